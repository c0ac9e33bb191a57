"""A model is planned by the recipe and its data, or by the checkpoint that a run goes on from."""

import pytest

from tests import tiny
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError
from windlass.training.start.model_plan import check_vocabulary, recipe_architecture


@pytest.fixture(scope="module")
def prepared(base):
    config = tiny.recipe(base)
    return prepare(config.data, config.evaluate.sets, log=lambda sentence: None)


def test_the_vocabulary_and_the_end_of_text_come_from_the_tokenizer(base, prepared):
    architecture = recipe_architecture(tiny.recipe(base), prepared)
    assert (architecture.vocab_size, architecture.padded_vocab_size) == (300, 384)
    assert architecture.eos_token_id == prepared.eos_id


def test_a_tokenizer_of_more_entries_than_the_checkpoint_has_rows_is_refused(base, prepared):
    architecture = recipe_architecture(tiny.recipe(base), prepared)
    check_vocabulary(architecture.vocab_size, architecture)
    with pytest.raises(UserError, match="a tokenizer of 301 entries for a checkpoint of 300"):
        check_vocabulary(301, architecture)
