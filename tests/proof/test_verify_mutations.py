"""`windlass verify` goes red on published bugs, planted as patches of a copy of the source, and names where each is.

The ranks, processes of their own, import the patched copy; verify and what it compares with are as they are. One test runs the
command as a whole on a patched copy.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import windlass
from tests import tiny
from tests.proof.mutations.invented import INVENTED
from tests.proof.mutations.published import PUBLISHED, QUICK
from tests.proof.test_verify import FAMILIES
from windlass.config import check_recipe
from windlass.errors import EXIT_NOT_EQUAL
from windlass.proof import verify
from windlass.proof.fold_layout import fold
from windlass.proof.pool import Ranks
from windlass.proof.proxy import make_proxy
from windlass.recipe import apply_override

SOURCE = Path(windlass.__file__).parent
LIMIT_S = 600
BUGS = PUBLISHED | INVENTED
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


def copied(tmp_path, patches):
    """A copy of the package with `patches` -> the directory to import it from."""
    package = tmp_path / "patched" / "windlass"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, instead in patches:
        file = package / name
        found = file.read_text()
        assert found.count(text) == 1, f"{name} has this {found.count(text)} times: {text!r}"
        file.write_text(found.replace(text, instead))
    return package.parent


def proved(tmp_path, monkeypatch, patches, layout, model):
    """The verdict on the layout, its ranks importing the patched copy."""
    tree = tree_of(tmp_path, model)
    for override in layout:
        apply_override(tree, override)
    config = check_recipe(tree)
    (cell,) = fold(config.parallel, None, 8).cells
    proxy = make_proxy(config, config.model.architecture(300), cell, tmp_path / "proxy")
    monkeypatch.syspath_prepend(copied(tmp_path, patches))  # ranks take it over when they start
    pool = Ranks()
    try:
        return verify.prove(proxy, cell, pool)
    finally:
        pool.close()


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in BUGS])
def test_a_published_bug_is_seen_and_named(tmp_path, monkeypatch, name):
    bug = BUGS[name]
    verdict = proved(tmp_path, monkeypatch, bug.patches, bug.layout, bug.model)
    assert not verdict.failed and not verdict.agrees, verdict.failed
    assert (verdict.first.what, bug.named in verdict.first.where) == (bug.seen, True), verdict.first


@pytest.mark.parametrize("name", BUGS)
def test_every_patch_applies(name):
    for file, text, instead in BUGS[name].patches:
        assert (SOURCE / file).read_text().count(text) == 1, f"{file}: {text!r}"
        assert instead != text


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted({(bug.layout, bug.model) for bug in BUGS.values()}), ids=str)
def test_without_a_patch_the_same_road_is_green(tmp_path, monkeypatch, layout):
    verdict = proved(tmp_path, monkeypatch, (), *layout)
    assert verdict.agrees, (verdict.failed, verdict.first)


@pytest.mark.parametrize("name", [
    pytest.param("untied ends", marks=pytest.mark.long), "targets across the border of two documents count",
    pytest.param("documents begin one token late", marks=pytest.mark.long),
])  # fmt: skip
def test_the_command_on_a_patched_copy_names_what_differs(tmp_path, name):
    """The reference run, too, comes from the patched copy: a mistake in the rows that both sides read would cancel."""
    bug = BUGS[name]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree_of(tmp_path, bug.model)))
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "verify", "mine.yaml", *bug.layout, "--json", "out.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copied(tmp_path, bug.patches)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == EXIT_NOT_EQUAL, done.stdout + done.stderr
    assert f"first difference: {bug.seen}: " in done.stdout and bug.named in done.stdout
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cell["first"]["what"] == bug.seen and not cell["failed"]
