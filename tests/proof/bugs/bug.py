"""A row of the table of bugs."""

from dataclasses import dataclass

from tests.proof.planting import Patch


@dataclass(frozen=True)
class Seen:
    """What `windlass verify` says on a layout. `what`: the row of its table that differs first; `where`: reported of its first
    difference; `tensor`: named by the first row of weights that differs. Replicas that drift apart end the ranks before a row is
    compared: then `what` is OutOfSync."""

    layout: tuple[str, ...]
    what: str
    where: str
    model: str = "qwen3"
    tensor: str = ""


@dataclass(frozen=True)
class Bug:
    """`origin`: who has made it, or what it does. `cells` of test_same_loss (check: model: layout) turn red, each with `said` in
    its message; the first does so within `steps`, in `make test`. `verify`: what the command says. `mistake`: the function of
    test_known_mistakes that sees it."""

    origin: str
    patches: tuple[Patch, ...]
    cells: tuple[str, ...] = ()
    verify: Seen | None = None
    said: str = ""
    steps: int = 1
    mistake: str = ""
