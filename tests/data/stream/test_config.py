"""What can be said of the first epoch, and what is refused because it would do nothing."""

import pytest
from pydantic import ValidationError

from tests.data.conftest import data_config, refusal
from windlass.data.prepare.manifest import settings_of
from windlass.data.stream.config import EvaluateConfig, OrderConfig, StageConfig, beyond_stages


def refused(tmp_path, **settings):
    with pytest.raises(ValidationError) as caught:
        data_config(tmp_path, **settings)
    return str(caught.value)


def test_what_needs_written_order_is_refused_without_it():
    for setting in ({"held_out_of": 10}, {"deadline_s": 10.0}):
        ((key, value),) = setting.items()
        assert (
            f"{key}={value} with first_epoch=shuffled: it is for training that begins before all is prepared; set "
            f"first_epoch=written, or remove {key}"
        ) in refusal(OrderConfig, setting)
        OrderConfig.model_validate({**setting, "first_epoch": "written"})
    assert OrderConfig.model_validate(OrderConfig().model_dump()) == OrderConfig()


def test_settings_of_the_source_and_of_the_order_fit_together(tmp_path):
    written = {"first_epoch": "written"}
    own = {"path": "v.txt"}
    found = refused(tmp_path, validation=own, order={**written, "held_out_of": 10})
    assert "order.held_out_of=10 with validation={path: v.txt}: it says of how many documents a share for" in found
    growing = [{"path": "some", "grows_until": "_SUCCESS"}]
    assert (
        "sources[0].grows_until=_SUCCESS with order.first_epoch=shuffled: a shuffled first epoch needs a complete source, so "
        "`grows_until` has no effect; set order.first_epoch=written; or remove sources[0].grows_until, and prepare when the "
        "source is complete"
    ) in refused(tmp_path, sources=growing)
    for path in ("s3://bucket/some", "some/*.txt", ["a", "b"]):
        found = refused(tmp_path, sources=[{"path": path, "grows_until": "_SUCCESS"}], order=written)
        assert f"grows_until=_SUCCESS with path={path}: what grows is one local directory; give one as path" in found
    found = refused(tmp_path, sources=[{"path": "some", "grows_until": "a/b"}], order=written)
    rule = "it is the name of a file, which says that the directory is complete"
    assert f"grows_until=a/b: {rule}; give a file's name: grows_until=_SUCCESS" in found


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
        (
            {"sets": {"train": {"path": "x"}}},
            "sets={train: {path: x}}: a set's directory has its name, and that one is taken; choose another name in sets",
        ),
        (
            {"sets": {"../up": {"path": "x"}}},
            "sets={../up: {path: x}}: a set's name is a directory's name, and may hold letters, digits, _ . - only; choose "
            "another name in sets",
        ),
        ({"sequences": 0}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_validation_set_is_refused_in_words(settings, says):
    assert says in refusal(EvaluateConfig, settings)


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
        (
            {"stages": [{"weights": {"web": -1, "notes.txt": 1}}]},
            "weights={web: -1.0}: a share is 0 or more; correct it in weights",
        ),
        (
            {"stages": [{"weights": {"web": 0}}]},
            "weights={web: 0.0}: a stage reads at least one source, and all shares are 0; give a source in weights a "
            "share above 0",
        ),
        (
            {"stages": [{"weights": {"web": 1}}], "sources": SOURCES[:1]},
            "stages[0].weights={web: 1.0} with sources[0]=web: stages give shares to several sources, and have no effect on one; "
            "remove stages, or add sources to sources",
        ),
        (
            {"stages": [{"weights": {"a": 1}}], "sources": [{"path": "a"}, {"path": "a", "rows": "1:"}]},
            "sources[0]=a with sources[1]=a: stages find sources by name, so no two have the same; give each a name of its own: "
            "sources[0].name, sources[1].name",
        ),
        (
            {"stages": [{"weights": BOTH}], "sources": [{**source, "weight": 2} for source in SOURCES]},
            "sources[0].weight=2.0 with stages[0].weights={web: 1.0, notes.txt: 1.0}: where there are stages, they give the "
            "shares; remove stages, or sources[0].weight and those of the others",
        ),
        (
            {"stages": [{"weights": {**BOTH, "wbe": 1, "code": 2}}]},
            "stages[0].weights={wbe: 1.0, code: 2.0}: a stage gives shares to the sources, which are `web`, `notes.txt`; take a "
            "name from those, or add the source to sources",
        ),
        (
            {"stages": [{"weights": {"web": 1, "notes.txt": 0}}]},
            "sources[1]=notes.txt: each source has a share above 0 in some stage; give it a share in one of stages, or remove it "
            "from sources",
        ),
        (
            {"stages": [{"weights": BOTH}, {"tokens": 900, "weights": BOTH}]},
            "stages[0].weights={web: 1.0, notes.txt: 1.0} without stages[0].tokens: only the last stage may leave its tokens "
            "out; give stages[0].tokens",
        ),
        (
            {"stages": [{"tokens": 900, "weights": BOTH}, {"tokens": 3, "weights": BOTH}, {"weights": BOTH}]},
            "stages[1].tokens=3: a stage holds at least one sample, here of 16 tokens; give more as stages[1].tokens",
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
    assert (
        "lanes=4 with first_epoch=written: lanes are dealt from shuffled shards; remove lanes or first_epoch"
    ) in refusal(OrderConfig, {"lanes": 4, "first_epoch": "written"})
    mixed = data_config(tmp_path, sources=[{**source, "weight": 2} for source in SOURCES], order={"lanes": 4})
    assert mixed.mixture and mixed.order.lanes == 4
    assert settings_of(data_config(tmp_path, order={"lanes": 4}), {}) == settings_of(data_config(tmp_path), {})
