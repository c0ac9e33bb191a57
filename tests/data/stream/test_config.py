"""What can be said of the first epoch, and what is refused because it would do nothing."""

import pytest
from pydantic import ValidationError

from tests.data.conftest import data_config
from windlass.data.prepare.manifest import settings_of
from windlass.data.stream.config import EvaluateConfig, OrderConfig, StageConfig, beyond_stages


def refused(tmp_path, **settings):
    with pytest.raises(ValidationError) as caught:
        data_config(tmp_path, **settings)
    return str(caught.value)


def test_what_needs_written_order_is_refused_without_it():
    for setting in ({"held_out_of": 10}, {"deadline_s": 10.0}):
        with pytest.raises(ValidationError, match=f"{next(iter(setting))}: 10` is for training that begins before"):
            OrderConfig.model_validate(setting)
        OrderConfig.model_validate({**setting, "first_epoch": "written"})
    assert OrderConfig.model_validate(OrderConfig().model_dump()) == OrderConfig()


def test_settings_of_the_source_and_of_the_order_fit_together(tmp_path):
    written = {"first_epoch": "written"}
    own = {"path": "v.txt"}
    found = refused(tmp_path, validation=own, order={**written, "held_out_of": 10})
    assert "`order.held_out_of: 10` has no effect with a `validation` of its own" in found
    growing = [{"path": "some", "grows_until": "_SUCCESS"}]
    assert "`grows_until` of some has no effect with `order.first_epoch: shuffled`" in refused(
        tmp_path, sources=growing
    )
    for path in ("s3://bucket/some", "some/*.txt", ["a", "b"]):
        found = refused(tmp_path, sources=[{"path": path, "grows_until": "_SUCCESS"}], order=written)
        assert "`grows_until` is for `path`, one local directory" in found
    found = refused(tmp_path, sources=[{"path": "some", "grows_until": "a/b"}], order=written)
    assert "`grows_until: a/b` is not a file's name" in found


def test_training_may_begin_before_all_is_prepared_in_a_local_directory_without_a_mixture(tmp_path):
    written = {"first_epoch": "written"}
    assert not data_config(tmp_path).may_grow and data_config(tmp_path, order=written).may_grow
    cache = {"directory": str(tmp_path / "cache"), "limit_mib": 10}
    assert not data_config(tmp_path, order=written, directory="s3://bucket/data", cache=cache).may_grow
    mixed = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]
    assert not data_config(tmp_path, order=written, sources=mixed).may_grow


def test_the_order_decides_nothing_of_what_is_on_disk_but_what_is_held_out(tmp_path):
    written = {"first_epoch": "written", "deadline_s": 7.0}
    plain, in_order = settings_of(data_config(tmp_path), {}), settings_of(data_config(tmp_path, order=written), {})
    held_out = settings_of(data_config(tmp_path, order={**written, "held_out_of": 9}), {})
    assert plain == in_order and held_out == {**plain, "held_out_of": 9}
    assert "grows_until" not in plain["sources"][0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sets": {"train": {"path": "x"}}}, "cannot be named `train`"),
        ({"sets": {"../up": {"path": "x"}}}, "`../up` may hold letters, digits"),
        ({"sequences": 0}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_validation_set_is_refused_in_words(settings, says):
    with pytest.raises(ValidationError) as caught:
        EvaluateConfig.model_validate(settings)
    assert says in str(caught.value)


SOURCES = [{"path": "w/*.txt", "name": "web"}, {"path": "notes.txt"}]


def test_stages_begin_at_their_sample_and_name_sources_by_name_or_path(tmp_path):
    stages = [{"tokens": "1k", "weights": {"web": 3, "notes.txt": 1}}, {"tokens": 40, "weights": {"web": 1}}]
    stages += [{"weights": {"notes.txt": 0.5}}]
    found = data_config(tmp_path, sources=SOURCES, stages=stages, sequence_length=16)
    assert found.mixture == [(0, (3.0, 1.0)), (62, (1.0, 0.0)), (65, (0.0, 0.5))], "1000 / 16 and 1040 / 16 samples"
    assert found.labels == ["web", "notes.txt"] and not data_config(tmp_path, sources=SOURCES).mixture


def test_stages_and_names_decide_nothing_of_what_is_on_disk_but_that_sources_are_mixed(tmp_path):
    weighted = [{**source, "weight": 2} for source in SOURCES]
    stages = [{"weights": {"web": 3, "notes.txt": 1}}]
    plain = settings_of(data_config(tmp_path, sources=weighted), {})
    assert plain == settings_of(data_config(tmp_path, sources=SOURCES, stages=stages), {})
    unnamed = [{"path": "w/*.txt", "weight": 1}, {"path": "notes.txt", "weight": 1}]
    assert plain == settings_of(data_config(tmp_path, sources=unnamed), {})
    assert plain != settings_of(data_config(tmp_path, sources=SOURCES), {})


BOTH = {"web": 1, "notes.txt": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": [{"weights": {}}]}, "at least 1 item"),
        ({"stages": [{"weights": {"web": -1, "notes.txt": 1}}]}, "`web: -1` in `weights`; a share is 0 or more"),
        ({"stages": [{"weights": {"web": 0}}]}, "all `weights` are 0; a stage reads at least one source"),
        ({"stages": [{"weights": {"web": 1}}], "sources": SOURCES[:1]}, "`stages` has no effect on one source"),
        (
            {"stages": [{"weights": {"a": 1}}], "sources": [{"path": "a"}, {"path": "a", "rows": "1:"}]},
            "`stages` finds sources by name, and 2 are `a`: give each its own `name`",
        ),
        (
            {"stages": [{"weights": BOTH}], "sources": [{**source, "weight": 2} for source in SOURCES]},
            "web has `weight: 2`, and `stages` gives the shares: leave one of them out",
        ),
        (
            {"stages": [{"weights": {**BOTH, "wbe": 1, "code": 2}}]},
            "`stages` has a weight of `wbe`, `code`, and the sources are `web`, `notes.txt`",
        ),
        (
            {"stages": [{"weights": {"web": 1, "notes.txt": 0}}]},
            "no stage reads notes.txt: give it a weight, or take it out",
        ),
        (
            {"stages": [{"weights": BOTH}, {"tokens": 900, "weights": BOTH}]},
            "`stages[0]` has no `tokens`; only the last stage may leave them out",
        ),
        (
            {"stages": [{"tokens": 900, "weights": BOTH}, {"tokens": 3, "weights": BOTH}, {"weights": BOTH}]},
            "`stages[1].tokens: 3` holds no sample of 16 tokens; give the stage more",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused_in_words(tmp_path, changes, said):
    assert said in refused(tmp_path, **{"sources": SOURCES, "sequence_length": 16, **changes})


def test_a_run_ends_with_its_last_stage():
    stages = [StageConfig(tokens=960, weights={"a": 1}), StageConfig(tokens=65, weights={"b": 1})]
    assert not list(beyond_stages(stages, 33, 32)), "1056 tokens: the last step is rounded up"
    assert not list(beyond_stages([*stages[:1], StageConfig(weights={"b": 1})], 10**9, 32))
    (error,) = beyond_stages(stages, 34, 32)
    assert error.given == "data.stages end at 1025 tokens, and the run has 1088"
    assert "leave `tokens` of the last stage out" in error.change


def test_lanes_are_of_shuffled_shards(tmp_path):
    with pytest.raises(
        ValidationError, match="`lanes: 4` with `first_epoch: written`: lanes are dealt from shuffled shards"
    ):
        OrderConfig.model_validate({"lanes": 4, "first_epoch": "written"})
    mixed = data_config(tmp_path, sources=[{**source, "weight": 2} for source in SOURCES], order={"lanes": 4})
    assert mixed.mixture and mixed.order.lanes == 4
    assert settings_of(data_config(tmp_path, order={"lanes": 4}), {}) == settings_of(data_config(tmp_path), {})
