"""What a recipe may say about filters, and what is refused before a file is read."""

import pytest
from pydantic import ValidationError

from tests.data.conftest import data_config, refusal
from windlass.data.config import SourceConfig
from windlass.data.curate.config import FiltersConfig, NearDuplicatesConfig


def test_filters_are_applied_in_one_order_whatever_the_recipes():
    assert FiltersConfig(max_chars="10k", min_words=3, min_chars=2).given == ["min_chars", "max_chars", "min_words"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"min_chars": None},
            "{min_chars: null}: `filters` names at least one filter; name one, such as min_chars=200, or leave the section out",
        ),
        (
            {"min_chars": 9, "max_chars": 8},
            "min_chars=9 with max_chars=8: the shortest is above the longest, and no document is left; swap them: min_chars=8 "
            "and max_chars=9",
        ),
        ({"min_char": 9}, "min_char"),
        ({"min_chars": True}, "a number or text is meant"),
        ({"min_chars": 0}, "greater than or equal to 1"),
        ({"min_alpha": 1.1}, "less than or equal to 1"),
        ({"max_line_repetition": 1.0}, "less than 1"),
    ],
)
def test_what_is_no_filter_is_refused(given, message):
    assert message in refusal(FiltersConfig, given)


@pytest.mark.parametrize("kind", ["preference", "tokens"])
def test_what_is_neither_text_nor_conversation_has_no_filters(kind):
    assert (
        f"filters={{min_chars: 2}} with format={kind}: filters look at texts or conversations; remove filters"
    ) in refusal(SourceConfig, {"path": "a", "format": kind, "filters": {"min_chars": 2}})


@pytest.mark.parametrize("kind", ["preference", "tokens"])
def test_what_is_neither_text_nor_conversation_has_no_near_duplicates(tmp_path, kind):
    sources = [{"path": "a"}, {"path": "b", "format": kind}][kind == "preference" :]
    settings = {"sources": sources, "validation": "none", "tokenizer": {"from": "gpt2"}}
    with pytest.raises(ValidationError) as caught:
        data_config(tmp_path, **settings, deduplicate={"similarity": 0.8})
    assert (
        f"deduplicate={{similarity: 0.8}} with sources[{int(kind == 'tokens')}].format={kind}: near duplicates are found by the "
        "words of texts and conversations; set deduplicate=true, which compares all bytes"
    ) in str(caught.value)
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
