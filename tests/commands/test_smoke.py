"""The rehearsal passes on a sound recipe, leaves nothing, and names what is wrong with a resumed run."""

import json

import pytest
import yaml

from tests import tiny
from windlass.commands import smoke as page
from windlass.commands.smoke import rehearse
from windlass.errors import EXIT_USER_ERROR, UserError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("rehearse")
    tree = tiny.recipe(base).model_dump(mode="json", by_alias=True, exclude_none=True)
    (base / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return base


@pytest.mark.long
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_sound_recipe_passes_and_leaves_nothing(base, capfd, nproc):
    assert rehearse(str(base / "tiny.yaml"), ["optim.schedule=wsd"], nproc, base / "run") == 0
    out = capfd.readouterr().out
    assert "smoke: passed: train, evaluate, save, kill, resume, export" in out
    assert "smoke: peak memory of a rank" in out and "a checkpoint" in out
    assert "from step 2" in out, "it was killed and resumed"
    assert {path.name for path in base.iterdir()} == {"corpus", "data", ".data.lock", "tiny.yaml"}


def test_a_command_that_fails_ends_it_with_its_exit_code(base, capfd):
    before = {path.name for path in base.iterdir()}
    assert rehearse(str(base / "tiny.yaml"), ["run.start_from=nowhere"], "1", base / "run") == EXIT_USER_ERROR
    assert "nowhere" in capfd.readouterr().err
    assert {path.name for path in base.iterdir()} - before <= {"data", ".data.lock"}


GOOD = [("step", 1, 5.0), ("step", 2, 4.0), ("step", 3, 3.5), ("resume", 2, None), ("step", 3, 3.5), ("step", 4, 3.0)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (GOOD, None),
        (GOOD[:3], "started again without resuming from step 2"),
        ([("resume", 3, None) if line[0] == "resume" else line for line in GOOD], "without resuming from step 2"),
        ([*GOOD, ("step", 5, None)], "the loss of step 5 is not finite"),
        ([*GOOD[:4], ("step", 3, 3.25)], "step 3 lost 3.5 before the kill and 3.25 after the resume"),
    ],
)
def test_what_the_resumed_run_must_show(tmp_path, lines, said):
    made = [{"kind": kind, "time": 0.0, "step": step, "loss": loss} for kind, step, loss in lines]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    if said is None:
        page._check(tmp_path, is_exact=True)
        return
    with pytest.raises(UserError, match=said):
        page._check(tmp_path, is_exact=True)


def test_kernels_that_differ_from_run_to_run_are_compared_nearly(tmp_path):
    """On a GPU, where run.deterministic does not ask for others (precision/same_bits.py)."""

    def lines(loss, device="NVIDIA H200", deterministic=False):
        made = [("start", 0, None), *GOOD[:4], ("step", 3, loss)]
        events = [{"kind": kind, "time": 0.0, "step": step, "loss": loss} for kind, step, loss in made]
        events[0]["facts"] = {"device": device}
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
        (tmp_path / "resolved.yaml").write_text(f"run: {{deterministic: {str(deterministic).lower()}}}")
        return page.gives_same_bits(tmp_path)

    assert lines(3.5, "CPU") and lines(3.5, deterministic=True) and not lines(3.5)
    assert not lines(3.503)
    page._check(tmp_path, is_exact=False)
    with pytest.raises(UserError, match=r"with run\.deterministic=true, else to 0.001 of the loss"):
        page._check(tmp_path, is_exact=True)
    lines(3.504)
    with pytest.raises(UserError, match=r"step 3 lost 3\.5 before the kill and 3\.504 after"):
        page._check(tmp_path, is_exact=False)
