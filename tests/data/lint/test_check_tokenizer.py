"""The tokenizer of the data beside that of a model: the same ids for the same tokens, the same end."""

import json

import pytest
from tokenizers import Tokenizer

from tests.data.planted import TURN, Planted, texts
from windlass.data.lint.lint import lint


@pytest.fixture
def planted(small, tmp_path):
    return Planted(small, tmp_path / "data")


def write_model(planted, directory, *, eos=None, generation_eos=None, change=None):
    """A model's directory with the data's own tokenizer, changed by `change`."""
    directory.mkdir()
    tree = json.loads((planted.directory / "tokenizer" / "tokenizer.json").read_text())
    if change is not None:
        change(tree)
    (directory / "tokenizer.json").write_text(json.dumps(tree))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": planted.eos if eos is None else eos}))
    if generation_eos is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return directory


def findings(planted, model):
    return lint(planted.prepared(texts()), model=model).findings


def test_the_models_own_tokenizer_is_fine_and_so_is_one_with_more_tokens(planted, tmp_path):
    prepared = planted.prepared(texts())
    assert lint(prepared, model=write_model(planted, tmp_path / "same")).findings == []
    model = write_model(planted, tmp_path / "more")
    larger = Tokenizer.from_file(str(model / "tokenizer.json"))
    larger.add_special_tokens(["<|tool|>"])
    larger.save(str(model / "tokenizer.json"))
    assert lint(prepared, model=model).findings == []


def test_another_models_tokenizer_is_an_error_with_the_first_token_that_differs(planted, tmp_path):
    def swap(tree):
        vocabulary = tree["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    (finding,) = findings(planted, write_model(planted, tmp_path / "other", change=swap))
    assert (finding.severity, finding.code) == ("error", "tokenizer-of-another-model")
    assert finding.what.startswith(f"2 of {planted.vocab_size} ids are other tokens than in ")
    assert finding.what.endswith("'a' here, 'b' there")


@pytest.mark.parametrize("where", ["eos", "generation_eos"])
def test_a_model_that_ends_otherwise_is_a_warning(planted, tmp_path, where):
    model = write_model(
        planted, tmp_path / "model", **{where: [planted.turn] if where == "generation_eos" else planted.turn}
    )
    (finding,) = findings(planted, model)
    assert (finding.severity, finding.code) == ("warning", "model-ends-otherwise")
    assert (
        finding.what
        == f"documents end by <|endoftext|> (id {planted.eos}), the model's text by {TURN} (id {planted.turn})"
    )


def test_a_model_with_several_ends_and_one_without_a_tokenizer_are_fine(planted, tmp_path):
    model = write_model(planted, tmp_path / "model", generation_eos=[planted.turn, planted.eos])
    (model / "tokenizer.json").unlink()
    assert findings(planted, model) == []
