"""Whether rows of a sequence see each other in a recipe that was imported: as in the tool, for each way in which it packs."""

import pytest

from tests.commands.recipes.test_import_recipe import AXOLOTL, FACTORY, of, tuned
from windlass.commands.recipes.row_borders import ALONE
from windlass.config import parse_recipe

CHAT = {"base_model": "a/b", "datasets": [{"path": "x.jsonl", "type": "chat_template"}]}
STREAM = {"base_model": "a/b", "pretraining_dataset": [{"path": "org/texts", "type": "pretrain"}], "max_steps": 9}
TALKS = {"mine": {"file_name": "m.jsonl", "formatting": "sharegpt"}}
TEXT, TALK = (
    {"_component_": "text_completion_dataset", "source": "a/b"},
    {"_component_": "chat_dataset", "source": "a/b"},
)


def borders(found):
    """`isolate` and `packing`, and the reason, which the recipe has as a comment. The recipe loads."""
    data, text = found.tree["data"], found.text("file.yaml")
    said = [why for setting, why in found.assumed if "data.isolate" in setting]
    assert len(said) == 1 and f"data.isolate={str(data['isolate']).lower()}: {said[0]}\n" in text
    assert parse_recipe(text, "file.yaml").data.isolate == data["isolate"]
    return data["isolate"], data.get("packing"), said[0]


@pytest.mark.parametrize(
    ("given", "isolate", "packing", "said"),
    [
        ({**CHAT, "sample_packing": True}, True, None, "sample_packing: true"),
        ({**CHAT, "sample_packing": False}, True, None, ALONE),
        (CHAT, True, None, ALONE),
        ({**AXOLOTL, "sample_packing": True}, True, "best-fit", "sample_packing: true"),
        (AXOLOTL, True, "best-fit", ALONE),
        ({**STREAM, "sample_packing": True}, True, "best-fit", "pretrain_multipack_attn: true"),
        (
            {**STREAM, "sample_packing": True, "pretrain_multipack_attn": False},
            False,
            "best-fit",
            "pretrain_multipack_attn: false",
        ),
        ({**STREAM, "pretraining_sample_concatenation": True}, False, "best-fit", "texts see those before them"),
        (STREAM, True, "best-fit", "is not lost here"),
    ],
    ids=str,
)
def test_axolotl(given, isolate, packing, said):
    """A chat saw all the chats before it, and no line said so."""
    found = of(given, "axolotl")
    assert borders(found)[:2] == (isolate, packing) and said in borders(found)[2]
    assert not any("pack" in key or "concatenation" in key for key, _ in found.left)


@pytest.mark.parametrize(
    ("more", "isolate", "packing", "said"),
    [
        ({}, True, None, ALONE),
        ({"packing": False}, True, None, ALONE),
        ({"packing": True}, False, None, "packing: true without neat_packing"),
        ({"neat_packing": True}, True, None, "neat_packing: true"),
        ({"packing": True, "neat_packing": True}, True, None, "neat_packing: true"),
        ({"stage": "pt"}, False, "concatenate", "texts follow each other"),
        ({"stage": "pt", "packing": True}, False, "concatenate", "texts follow each other"),
        ({"stage": "pt", "packing": False}, True, "best-fit", "is not lost here"),
    ],
    ids=str,
)
def test_llama_factory(more, isolate, packing, said):
    found = of({**FACTORY, **more}, datasets=TALKS)
    assert borders(found)[:2] == (isolate, packing) and said in borders(found)[2]
    assert not any("packing" in key for key, _ in found.left)


@pytest.mark.parametrize(
    ("datasets", "packing", "said"),
    [
        ([{**TALK, "packed": True}], None, "packed: true"),
        ([{**TALK, "packed": False}], None, ALONE),
        ([{**TEXT, "packed": True}], "concatenate", "packed: true"),
        ([{**TEXT, "packed": True, "split_across_pack": False}], "best-fit", "packed: true"),
        ([TEXT], "best-fit", ALONE),
        ([{**TEXT, "packed": True}, TEXT], "best-fit", ALONE),
    ],
    ids=str,
)
def test_torchtune(datasets, packing, said):
    found = tuned(*datasets)
    assert borders(found)[:2] == (True, packing) and said in borders(found)[2]
    assert not any("pack" in key for key, _ in found.left)


@pytest.mark.parametrize("key", ["packing", "neat_packing"])
def test_pairs_share_no_sequence(key):
    """With `isolate` or `packing` the recipe was refused: they have no effect on pairs."""
    info = {"mine": {"file_name": "m.jsonl", "ranking": True}}
    found = of({**FACTORY, "stage": "dpo", key: True}, datasets=info)
    assert {"isolate", "packing"}.isdisjoint(found.tree["data"])
    parse_recipe(found.text("file.yaml"), "file.yaml")
