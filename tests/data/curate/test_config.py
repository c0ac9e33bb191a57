"""What a recipe may say about filters, and what is refused before a file is read."""

import pytest
from pydantic import ValidationError

from tests.data.conftest import data_config
from windlass.data.config import SourceConfig
from windlass.data.curate.config import FiltersConfig, NearDuplicatesConfig


def test_filters_are_applied_in_one_order_whatever_the_recipes():
    assert FiltersConfig(max_chars="10k", min_words=3, min_chars=2).given == ["min_chars", "max_chars", "min_words"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "`filters` names no filter: name one, such as min_chars: 200"),
        ({"min_chars": 9, "max_chars": 8}, "`min_chars: 9` is above `max_chars: 8`, and no document is left"),
        ({"min_char": 9}, "min_char"),
        ({"min_chars": True}, "a number or text is meant"),
        ({"min_chars": 0}, "greater than or equal to 1"),
        ({"min_alpha": 1.1}, "less than or equal to 1"),
        ({"max_line_repetition": 1.0}, "less than 1"),
    ],
)
def test_what_is_no_filter_is_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        FiltersConfig.model_validate(given)


@pytest.mark.parametrize("kind", ["preference", "tokens"])
def test_what_is_neither_text_nor_conversation_has_no_filters(kind):
    with pytest.raises(ValidationError, match=f"`filters` of `format: {kind}` look at texts or conversations"):
        SourceConfig.model_validate({"path": "a", "format": kind, "filters": {"min_chars": 2}})


@pytest.mark.parametrize("kind", ["preference", "tokens"])
def test_what_is_neither_text_nor_conversation_has_no_near_duplicates(tmp_path, kind):
    sources = [{"path": "a"}, {"path": "b", "format": kind}][kind == "preference" :]
    settings = {"sources": sources, "validation": "none", "tokenizer": {"from": "gpt2"}}
    with pytest.raises(
        ValidationError, match=f"`deduplicate: {{similarity: 0.8}}` with `format: {kind}`: it compares the"
    ):
        data_config(tmp_path, **settings, deduplicate={"similarity": 0.8})
    assert data_config(tmp_path, **settings, deduplicate=True).deduplicate is True


def test_duplicates_are_exact_near_or_left_in(tmp_path):
    given = [data_config(tmp_path, deduplicate=one).deduplicate for one in (False, True, {"similarity": "0.75"})]
    assert given == [False, True, NearDuplicatesConfig(similarity=0.75, ngram=5, num_perm=128)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"similarity": 0.05}, "greater than or equal to 0.1"),
        ({"similarity": 1.5}, "less than or equal to 1"),
        ({"similarity": 0.8, "num_perm": 100}, "64, 128, 256 or 512"),
        ({"similarity": 0.8, "ngram": 0}, "greater than or equal to 1"),
        ({"ngram": 5}, "Field required"),
    ],
)
def test_what_no_near_duplicates_can_be_found_by_is_refused(tmp_path, given, message):
    with pytest.raises(ValidationError, match=message):
        data_config(tmp_path, deduplicate=given)
