"""`windlass verify` goes red on the bugs of the table, planted in its ranks, and names where each is.

Verify and what it compares with are as they are; in one test the command as a whole has the bug, its reference run too.
"""

import json

import pytest
import yaml

from tests import tiny
from tests.proof.bugs import BUGS
from tests.proof.planting import Planting, planted
from tests.proof.test_verify import FAMILIES, run_command
from windlass.config import check_recipe
from windlass.errors import EXIT_NOT_EQUAL, OutOfSync
from windlass.proof import verify
from windlass.proof.fold_layout import fold_onto_ranks
from windlass.proof.proxy import make_proxy
from windlass.recipe import apply_override

SEEN = {name: bug for name, bug in BUGS.items() if bug.verify}
COMMAND = "targets across the border of two documents count"
MODELS = {
    "qwen3": {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3_moe": {**FAMILIES["qwen3_moe"], "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3_two_groups": {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "two_layers": {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2},
    "gpt2": {**FAMILIES["gpt2"], "n_layer": 4, "n_head": 6},
    "padded": {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 7},
}


def tree_of(tmp_path, model):
    tree = tiny.recipe(tmp_path / "tiny", model=MODELS[model]).model_dump(mode="json", by_alias=True, exclude_none=True)
    del tree["parallel"]
    return tree


def proved(tmp_path, ranks, patches, layout, model):
    """The verdict on the layout, whose ranks have the patches."""
    tree = tree_of(tmp_path, model)
    for override in layout:
        apply_override(tree, override)
    config = check_recipe(tree)
    (cell,) = fold_onto_ranks(config.parallel, None, 8).cells
    proxy = make_proxy(config, config.model.architecture(300), cell, tmp_path / "proxy")
    return verify.prove(proxy, cell, Planting(ranks, patches))


def is_quick(name):
    """Each bug is seen once in `make test`: by a cell of test_same_loss, by test_known_mistakes, by the command, or else here."""
    return name == "a layer of a later stage does not rotate" or not (
        name == COMMAND or SEEN[name].cells or SEEN[name].mistake
    )


@pytest.mark.parametrize("name", [n if is_quick(n) else pytest.param(n, marks=pytest.mark.long) for n in SEEN])
def test_a_bug_is_seen_and_named(tmp_path, ranks, name):
    seen = SEEN[name].verify
    verdict = proved(tmp_path, ranks, SEEN[name].patches, seen.layout, seen.model)
    if seen.what == OutOfSync.__name__:
        assert f"{seen.what}: {seen.where}" in verdict.failed and not verdict.agrees
        return
    assert not verdict.failed and not verdict.agrees, verdict.failed
    assert (verdict.first.what, seen.where in verdict.first.where) == (seen.what, True), verdict.first
    if seen.tensor:
        weights = next(row.where for row in verdict.rows if not row.agrees and "weights" in row.what)
        assert weights.startswith(seen.tensor) and "the furthest apart of" in weights


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted({(bug.verify.layout, bug.verify.model) for bug in SEEN.values()}), ids=str)
def test_without_a_bug_the_same_road_is_green(tmp_path, ranks, layout):
    verdict = proved(tmp_path, ranks, (), *layout)
    assert verdict.agrees, (verdict.failed, verdict.first)


@pytest.mark.parametrize("name", [
    COMMAND, *(pytest.param(name, marks=pytest.mark.long) for name in ("untied ends", "documents begin one token late"))
])  # fmt: skip
def test_the_command_with_a_bug_in_all_of_it_names_what_differs(tmp_path, ranks, monkeypatch, capsys, name):
    """A mistake in the rows that both sides read would cancel if the reference run took them from the same code."""
    bug = SEEN[name]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree_of(tmp_path, bug.verify.model)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "Ranks", lambda _warn: Planting(ranks, bug.patches))
    monkeypatch.setattr(Planting, "close", lambda _pool: None)  # the session's pool goes on
    with planted(bug.patches):
        assert run_command(monkeypatch, "mine.yaml", *bug.verify.layout, "--json", "out.json") == EXIT_NOT_EQUAL
    out = capsys.readouterr().out
    assert f"first difference: {bug.verify.what}: " in out and bug.verify.where in out
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cell["first"]["what"] == bug.verify.what and not cell["failed"]
