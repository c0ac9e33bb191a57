"""hub.cache is a local directory, for recipes that name something of the hub; both sections get it."""

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.model.open_config import model_directory


def test_a_cache_of_nothing_and_a_url_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"hub\.cache=x with neither"):
        tiny.recipe(tmp_path, hub={"cache": "x"})
    with pytest.raises(UserError) as caught:
        tiny.recipe(tmp_path, hub={"cache": "s3://b"})
    assert (caught.value.given, caught.value.rule, caught.value.change) == (
        "hub.cache=s3://b",
        "the cache is a local directory",
        "give a local directory that every node sees as hub.cache",
    )


def test_what_names_the_hub_is_looked_for_in_the_cache(tmp_path):
    named = {**dict.fromkeys(tiny.QWEN3_KEYS), "family": None, "from": "org/tiny"}
    data = {"tokenizer": {"from": "org/tiny"}}
    config = tiny.recipe(tmp_path, model=named, data=data, hub={"cache": "~/kept"})
    assert config.hub.cache is not None and "~" not in config.hub.cache
    assert config.data.tokenizer.hub_cache == config.hub.cache
    with pytest.raises(UserError) as caught:
        model_directory(config.model)
    assert config.hub.cache in caught.value.given
