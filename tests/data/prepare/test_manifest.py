"""A preparation is recognised by its settings, and a damaged one is never taken for whole."""

import json
import shutil
from pathlib import Path

import pytest

from tests.data.conftest import data_config
from windlass.data.config import SourceConfig
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.prepare.manifest import load_prepared, open_prepared
from windlass.data.shards import mds
from windlass.errors import BadShard, UserError


@pytest.fixture
def copied(small, tmp_path):
    """(config, directory) of a copy that a test may damage."""
    config, prepared, _ = small
    shutil.copytree(prepared.directory, tmp_path / "data")
    return config.model_copy(update={"directory": str(tmp_path / "data")}), tmp_path / "data"


def refused(config, sets=None, kind=UserError):
    with pytest.raises(kind) as caught:
        open_prepared(config, sets or {})
    return caught.value


def test_it_opens_as_it_was_made(small):
    config, prepared, _ = small
    assert open_prepared(config, {}) == prepared
    assert prepared.tokenizer_directory.is_dir() and set(prepared.sets) == {"train", "validation"}


def test_it_may_be_moved(copied, small):
    config, directory = copied
    moved = open_prepared(config, {})
    assert moved.directory == directory and moved.sets == small[1].sets


def test_nothing_prepared_says_how(tmp_path):
    error = refused(data_config(tmp_path))
    assert f"{tmp_path}/data holds no prepared data" in error.given and "windlass prepare" in error.change


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence_length": 34}, "was prepared with sequence_length 33, the recipe has 34"),
        ({"tokenizer": {"train": 301}}, "'train': 300"),
        ({"validation": 0.21}, "was prepared with validation 0.2, the recipe has 0.21"),
        ({"sources": [{"path": "elsewhere"}]}, "was prepared with sources"),
        ({"shard_bytes": 1 << 20}, "was prepared with shard_bytes 8192, the recipe has 1048576"),
    ],
)
def test_other_settings_are_named(small, changes, says):
    config, _, _ = small
    error = refused(data_config(Path(config.directory).parent, **changes))
    assert says in error.given and "windlass prepare" in error.change


def test_another_evaluation_set_is_another_preparation(small):
    assert "was prepared with sets {}" in refused(small[0], {"code": SourceConfig(path="x")}).given


def test_the_shuffle_and_the_place_do_not_make_another_preparation(small, tmp_path):
    config, _, _ = small
    other = config.model_copy(update={"shuffle_window": 99, "directory": str(tmp_path)})
    assert settings_of(config, {}) == settings_of(other, {})


def test_a_damaged_prepared_json_is_named(copied):
    config, directory = copied
    for content in ("{", "{}", '{"sets": 1}', '{"sets": {"train": 1}}', "[]"):
        (directory / "prepared.json").write_text(content)
        error = refused(config)
        assert f"{directory}/prepared.json cannot be read" in error.given and f"delete {directory}" in error.change


def test_a_prepared_json_of_another_version_names_the_keys(copied):
    config, directory = copied
    path = directory / "prepared.json"
    content = json.loads(path.read_text())
    assert not {"remote", "is_whole"} & set(content), "what is not saved is no key of it"

    def said(changed):
        path.write_text(json.dumps(changed))
        error = refused(config)
        assert error.change == f"delete {directory} and prepare again"
        return error.given

    begin = f"{path} was written by another version of windlass: "
    assert said({key: value for key, value in content.items() if key != "eos_id"}) == f"{begin}it has no `eos_id`"
    assert said({key: value for key, value in content.items() if key != "commits"}) == f"{begin}it has no `commits`"
    assert said({**content, "flavour": 1}) == f"{begin}`flavour` is not known to this one"
    assert said({**content, "remote": None}) == f"{begin}`remote` is not known to this one"
    left_out = {
        name: {key: value for key, value in info.items() if key != "left_out"} for name, info in content["sets"].items()
    }
    assert said({**content, "sets": left_out}) == f"{begin}it has no `left_out`"
    sets = {name: {**info, "pages": 1} for name, info in content["sets"].items()}
    assert said({**content, "sets": sets}) == f"{begin}`pages` is not known to this one"


def test_a_missing_shard_is_found_at_once(copied):
    config, directory = copied
    (directory / "train" / "shard.00000.mds").unlink()
    assert "train/shard.00000.mds is missing" in refused(config, kind=BadShard).given


def test_a_rank_that_does_not_look_at_every_file_opens_by_the_index_and_finds_one_when_it_loads_it(copied, monkeypatch):
    config, directory = copied
    looked = []
    real = mds._check_file
    monkeypatch.setattr(mds, "_check_file", lambda file, *given: (looked.append(file.name), real(file, *given)))
    whole = open_prepared(config, {})
    files = [shard.stored.name for name in whole.sets for shard in whole.shards(name).shards]
    assert looked == files and len(files) > 2
    looked.clear()
    (directory / "train" / "shard.00001.mds").unlink()
    shards = open_prepared(config, {}, looks=False).shards("train")
    shards.load(0)
    assert looked == ["shard.00000.mds"]
    with pytest.raises(BadShard, match=r"shard\.00001\.mds is missing"):
        shards.load(1)
    (directory / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(BadShard, match=r"tokenizer\.json has the hash"):
        open_prepared(config, {}, looks=False)


def test_a_set_with_fewer_samples_than_promised_is_found(copied):
    config, directory = copied
    index = json.loads((directory / "train" / "index.json").read_text())
    index["shards"].pop()
    (directory / "train" / "index.json").write_text(json.dumps(index))
    wanted = load_prepared(directory).sets["train"].samples
    assert f"promises {wanted}" in refused(config, kind=BadShard).rule
