"""When the sets are scored in the middle of a run. Saves: test_saving.py."""

from tests import tiny


def test_validation_runs_at_the_start_on_its_steps_and_at_the_end(base, ranks):
    config = tiny.recipe(
        base,
        "validated",
        evaluate={"every_steps": 4, "sequences": 9999, "sets": {"own": {"path": str(base / "corpus")}}},
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"directory": str(base / "data2")})})
    ranks.run(1, tiny.train, config)
    lines = tiny.lines(config.run.directory)
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [(line["step"], line["name"]) for line in validations] == [
        (step, name) for step in (0, 4, 8, 10) for name in ("validation", "own")
    ]
    assert len({line["targets"] for line in validations if line["name"] == "own"}) == 1, "always the same sequences"
    assert lines[0]["baselines"]["bigram"]["loss"] > 0, "the whole set is scored: the baselines are on the same tokens"
