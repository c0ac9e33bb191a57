"""What counts as damaged text, and what does not; test_lint.py plants every fault."""

import pytest

from windlass.data.lint.check_text import MOJIBAKE


@pytest.mark.parametrize(
    "text", ["Käse, schön: größer", "It’s “fine” – really…", "naïve café", "北京 Ω 🪝", "São Paulo É Â"]
)
def test_text_read_as_another_encoding_is_recognised_and_the_text_itself_is_not(text):
    assert MOJIBAKE.findall(text) == []
    wrong = text.encode().decode("latin-1")
    found = MOJIBAKE.findall(wrong)
    assert found or text.startswith("北"), wrong


def test_windows_1252_and_replacement_characters_are_recognised():
    assert MOJIBAKE.findall("â€™ â€œ Ã© Ã¼ Â» ï»¿ \ufffd") == ["â€™", "â€œ", "Ã©", "Ã¼", "Â»", "ï»¿", "\ufffd"]
