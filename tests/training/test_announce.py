"""What is told and written before step 1."""

import json

from tests import tiny


def test_the_run_directory_holds_recipe_resolved_settings_and_the_first_event(run):
    from windlass.config import check_recipe
    from windlass.recipe import parse_yaml

    resolved = (run / "resolved.yaml").read_text()
    assert "# layout: replicate 1 x shard 2, zero 3" in resolved and "# global batch: 8 sequences = 1" in resolved
    assert check_recipe(parse_yaml(resolved, "resolved.yaml")).run.steps == tiny.STEPS, "it loads as a recipe again"
    inside = (run / "checkpoints" / "step-00000010" / "resolved.yaml").read_text()
    for text in (resolved, inside):
        assert "# model rms_norm_eps: 1e-06\n" in text, "fields that the recipe leaves to the family"
    assert (run / "recipe.yaml").exists() and (run / "logs" / "rank-1.log").exists()
    first = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert (first["kind"], first["step"]) == ("start", 0)
    assert first["derived"]["parameters"].endswith("(16,184)")
    assert first["derived"]["attention"] == "flash for CPU"
    assert first["baselines"] == {}, "6 sequences are not the set that they are fitted for"
    assert first["provenance"]["hosts"]
