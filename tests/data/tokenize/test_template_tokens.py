"""The text of a template as ids, by tiktoken and by the tokenizer: the same ids, at the same places."""

import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from windlass.data.tokenize.template_tokens import TextEncoder, finder_of
from windlass.errors import UserError

TEXT = "<|im_start|>user\nnaïve é 🪝?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe red <b>one</b>.<|im_end|>\n"


@pytest.fixture
def encoders(small, tmp_path):
    """Makes (by the tokenizer, by tiktoken) of one with `<|im_start|>` and such."""

    def make(**flags):
        directory = tmp_path / "tokenizer"
        shutil.copytree(small[1].tokenizer_directory, directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        specials = [AddedToken(one, special=True, normalized=False, **flags) for one in ("<|im_start|>", "<|im_end|>")]
        tokenizer.add_special_tokens(specials)
        tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
        tokenizer.save(str(directory / "tokenizer.json"))
        return [TextEncoder(directory, tokenizer, is_fast) for is_fast in (False, True)], tokenizer

    return make


def test_both_ways_give_the_same_ids_and_find_the_same_ids_in_a_span(encoders):
    (plain, fast), tokenizer = encoders()
    assert (plain.is_fast, fast.is_fast) == (False, True)
    start = TEXT.index("The red")
    for span in ([0, 5], [TEXT.index("é"), TEXT.index("?")], [start, TEXT.rindex("\n")], [TEXT.index("🪝"), len(TEXT)]):
        found = [encoder.encode(TEXT, span) for encoder in (plain, fast)]
        assert found[0].ids_N.tolist() == found[1].ids_N.tolist() == tokenizer.encode(TEXT).ids
        inside = [np.searchsorted(one.starts_N, one.offsets).tolist() for one in found]
        assert inside[0] == inside[1]
    first, last = np.searchsorted(found[1].starts_N, fast.encode(TEXT, [start, len(TEXT)]).offsets).tolist()
    assert tokenizer.decode(found[1].ids_N[first:last].tolist(), skip_special_tokens=False) == TEXT[start:]


def test_tiktoken_leaves_special_tokens_that_take_spaces_to_the_tokenizer(encoders):
    (_, fast), tokenizer = encoders(rstrip=True)
    assert not fast.is_fast and fast.encode(TEXT).ids_N.tolist() == tokenizer.encode(TEXT).ids


def test_other_ids_are_an_error(encoders):
    (plain, fast), _ = encoders()
    fast.compare(TEXT)
    fast._fast = lambda text: np.zeros(1, np.int32)
    with pytest.raises(UserError) as caught:
        fast.compare(TEXT)
    assert caught.value.given.startswith("tiktoken and the tokenizer give other ids for '<|im_start|>user")
    plain.compare(TEXT)


def test_the_longest_special_token_is_found():
    assert finder_of(["<a>", "<a>b", "["]).split("x<a>b<a>[") == ["x", "<a>b", "", "<a>", "", "[", ""]
    assert finder_of([]).split("x") == ["x"] and finder_of([]).search("x") is None
