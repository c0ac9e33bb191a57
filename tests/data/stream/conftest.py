"""What tests of the stream read."""

import pytest

from tests.data.shards.test_mds import write
from windlass.data.shards.mds import Folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight shards."""
    directory = tmp_path_factory.mktemp("door") / "train"
    write(directory, num_samples=100, num_ids=9, shard_bytes=1500)
    return Folder(directory)
