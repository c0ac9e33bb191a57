"""Tokenizer and index of a preparation: what changed since it was written is named, and prepared again."""

import json
import shutil

import pytest

from tests.data.prepare.test_prepare import content
from windlass.data.prepare.manifest import check_shards, load_prepared, open_prepared
from windlass.data.prepare.prepare import prepare
from windlass.errors import BadShard


@pytest.fixture
def copied(small, tmp_path):
    """(config, directory) of a copy that a test may damage."""
    config, prepared, _ = small
    shutil.copytree(prepared.directory, tmp_path / "data")
    return config.model_copy(update={"directory": str(tmp_path / "data")}), tmp_path / "data"


def swap_ids(directory):
    path = directory / "tokenizer" / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocab = tree["model"]["vocab"]
    first, second = list(vocab)[70:72]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tree))


def swap_shards(directory):
    path = directory / "train" / "index.json"
    index = json.loads(path.read_text())
    index["shards"][:2] = index["shards"][1::-1]
    path.write_text(json.dumps(index))


DAMAGES = {
    "tokenizer/tokenizer.json has the hash": swap_ids,
    "train/index.json has the hash": swap_shards,
    "tokenizer/tokenizer_config.json is missing": lambda d: (d / "tokenizer" / "tokenizer_config.json").unlink(),
    "tokenizer/added_tokens.json was not there": lambda d: (d / "tokenizer" / "added_tokens.json").write_text("{}"),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_what_changed_is_named_and_prepared_again(copied, small, says):
    config, directory = copied
    DAMAGES[says](directory)
    with pytest.raises(BadShard) as caught:
        open_prepared(config, {})
    assert f"{directory}/{says}" in caught.value.given and "prepare the data again" in caught.value.change
    with pytest.raises(BadShard, match=says):
        check_shards(load_prepared(directory))
    lines = []
    prepare(config, {}, lines.append)
    assert any(says in line and line.startswith("preparing ") for line in lines)
    assert content(directory) == content(small[1].directory)


def test_what_does_not_belong_to_it_is_left_alone(copied):
    config, directory = copied
    (directory / "tokenizer" / ".hidden").write_text("")
    (directory / "tokenizer" / "folder").mkdir()
    open_prepared(config, {})


def test_max_bad_shards_leaves_out_shards_but_no_index(copied):
    config, directory = copied
    lenient = config.model_copy(update={"max_bad_shards": 1})
    (directory / "train" / "shard.00001.mds").unlink()
    open_prepared(lenient, {})
    swap_shards(directory)
    with pytest.raises(BadShard, match=r"train/index.json has the hash"):
        open_prepared(lenient, {})
