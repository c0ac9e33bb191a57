"""Data sets as LLaMA-Factory's dataset_info.json describes them."""

import pytest

from tests.commands.recipes.test_import_recipe import FACTORY, SHAREGPT, of


def test_a_described_dataset_is_where_and_what_it_is():
    tags = {"role_tag": "role", "content_tag": "content"}
    info = {
        "mine": {"file_name": "m.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    }
    found = of(FACTORY, datasets=info)
    assert (
        found.tree["data"]["sources"] == [{"path": "data/m.jsonl", "format": "chat", "too_long": "drop"}]
        and not found.left
    )
    hub = {"hf_hub_url": "org/m", "formatting": "sharegpt", "subset": "en", "split": "train"}
    found = of({**FACTORY, "dataset_dir": "sets"}, datasets={"mine": hub})
    assert found.tree["data"]["sources"][0] == {
        "hub": "org/m", "subset": "en", "split": "train", **SHAREGPT, "too_long": "drop",
    }  # fmt: skip
    assert found.left == []


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ({"prompt": "input", "response": "target"}, {"prompt": ["input"], "completion": "target"}),  # firefly
        ({"prompt": "instruction", "query": "input", "response": "output"}, "alpaca"),
        (
            {"prompt": "q", "query": "context", "system": "persona"},
            {"prompt": ["q", "context"], "completion": "output", "system": "persona"},
        ),
        ({}, "alpaca"),
    ],
)
def test_columns_of_alpaca_become_rows_of_the_source(columns, shape):
    info = {"mine": {"file_name": "m.jsonl", "columns": {**columns, "history": "before"}, "num_samples": 50}}
    found = of(FACTORY, datasets=info)
    assert found.tree["data"]["sources"] == [
        {"path": "data/m.jsonl", "format": "chat", "rows": shape, "too_long": "drop"}
    ]
    assert found.left == [
        ("num_samples of mine: 50", "`documents: N` or `rows: first:end` of the source"),
        ("history of mine: before", "no key of this version does what it does"),
    ]


@pytest.mark.parametrize(
    ("tags", "rows"),
    [
        ({"user_tag": "human", "assistant_tag": "gpt"}, "sharegpt"),
        ({"observation_tag": "observation", "function_tag": "function_call"}, "sharegpt"),
        (
            {"user_tag": "ask", "assistant_tag": "say"},
            {
                "messages": "conversations",
                "role": "from",
                "content": "value",
                "roles": {"ask": "user", "say": "assistant"},
            },
        ),
        ({"role_tag": "role", "content_tag": "content", "user_tag": "user"}, {"messages": "conversations"}),
        (
            {"role_tag": "role", "content_tag": "content", "user_tag": "User"},
            {"messages": "conversations", "roles": {"User": "user"}},
        ),
    ],
)
def test_tags_are_roles(tags, rows):
    info = {"mine": {"file_name": "m.jsonl", "formatting": "sharegpt", "columns": {"tools": "tools"}, "tags": tags}}
    found = of(FACTORY, datasets=info)
    assert found.tree["data"]["sources"][0]["rows"] == rows and found.left == []


def test_what_is_not_read_is_named_and_mirrors_are_not():
    info = {"mine": {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "columns": {"images": "images"}}}
    assert of(FACTORY, datasets=info).left == [("images of mine: images", "models here read text alone")]
