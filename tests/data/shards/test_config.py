"""A cache is a local directory."""

from tests.data.conftest import refusal
from windlass.data.shards.config import CacheConfig


def test_a_cache_is_local():
    assert (
        "directory=s3://bucket: shards are cached in a local directory, and this is a URL; give a local directory as directory"
    ) in refusal(CacheConfig, {"directory": "s3://bucket"})
    assert "greater than or equal to 1" in refusal(CacheConfig, {"directory": "c", "limit_mib": 0})
