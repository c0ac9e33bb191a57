"""A tokenizer that cannot be used is found before a source is read."""

import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_prepare import quietly
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("damage", "given"),
    [
        (lambda t: t.unlink(), "has no tokenizer.json"),
        (lambda t: t.write_text("{}"), "tokenizer.json has no key `model`"),
        (lambda t: t.write_text('{"model": {"type": "None"}}'), "tokenizer.json cannot be read: "),
        (
            lambda t: t.with_name("tokenizer_config.json").write_text('{"eos_token": "<end>"}'),
            "no token of the vocabulary",
        ),
        (
            lambda t: t.with_name("tokenizer_config.json").write_text('{"eos_token": "a"}'),
            "the text 'a' is encoded as the end-of-sequence token",
        ),
    ],
)
def test_a_wrong_tokenizer_is_found_before_a_source_is_read(tmp_path, monkeypatch, damage, given):
    (tmp_path / "src").mkdir()
    for number in range(4):
        (tmp_path / "src" / f"{number}.txt").write_text(make_text(40, number))
    sources = [{"path": str(tmp_path / "src")}]
    made = quietly(data_config(tmp_path, sources=sources, validation=0.5))
    damage(made.tokenizer_directory / "tokenizer.json")

    def read(*_):
        raise AssertionError("a source is read")

    monkeypatch.setattr("windlass.data.prepare.plan.scan", read)
    tokenizer = {"from": str(made.tokenizer_directory)}
    with pytest.raises(UserError) as caught:
        quietly(data_config(tmp_path, sources=sources, tokenizer=tokenizer, directory=str(tmp_path / "new")))
    assert given in caught.value.given


def test_a_missing_chat_template_is_found_before_a_source_is_read(tmp_path, monkeypatch, small):
    monkeypatch.setattr("windlass.data.prepare.plan.scan", lambda *_: pytest.fail("a source is read"))
    tokenizer = {"from": str(small[1].tokenizer_directory)}
    config = data_config(tmp_path, sources=[{"path": "x.jsonl", "format": "chat"}], tokenizer=tokenizer)
    with pytest.raises(UserError, match="has no chat template"):
        quietly(config)
