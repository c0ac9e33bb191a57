"""A cache is a local directory."""

import pytest
from pydantic import ValidationError

from windlass.data.shards.config import CacheConfig


def test_a_cache_is_local():
    with pytest.raises(ValidationError, match="shards are cached in a local directory"):
        CacheConfig(directory="s3://bucket")
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        CacheConfig(directory="c", limit_mib=0)
