"""No secret of a URL and no control character in what may be shown or kept."""

import io
import json

import pytest

from windlass import safe_text
from windlass.errors import BadShard, SeveralErrors, UserError
from windlass.safe_text import (
    escaped,
    escaped_json,
    keep_secret,
    printable,
    redacted,
    say,
    secret_values,
    shown,
    without_secrets,
    without_values,
)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GET https://me:pa55@host/a/b?X-Amz-Signature=51gn&k=1 failed", "GET https://***@host/a/b?*** failed"),
        ("s3://key:5ecret@bucket/x too", "s3://***@bucket/x too"),
        ("https://token@host/x", "https://***@host/x"),
        ("https://me:pa/55@host/x", "https://***@host/x"),
        ("http://me:pa@55@host:80/x", "http://***@host:80/x"),
        ("s3://AKIA:1pa/55@bucket/x", "s3://***@bucket/x"),
        ("http://me:pa?55@host:80/x?v=1", "http://***@host:80/x?***"),
        ("http://me:pa#55@host/x", "http://***@host/x"),
        ("`path: https://h/x?sig=51gn` matches no file", "`path: https://h/x?***` matches no file"),
        ("{path: https://h/x?sig=51gn, weight: 1}", "{path: https://h/x?***, weight: 1}"),
        ("{'path': 'https://h/x?sig=51gn'}", "{'path': 'https://h/x?***'}"),
        ("(see https://h/x?sig=51gn).", "(see https://h/x?***)."),
        ("https://h/x?sig=51gn: status 403", "https://h/x?***: status 403"),
        ("https:/h/x?sig=51gn", "https:/h/x?***"),  # what pathlib makes of it
        (r'"https:\/\/h/x?sig=51gn"', r'"https:\/\/h/x?***"'),  # what JSON may make of it
        ("https%3A%2F%2Fh%2Fx%3Fsig%3D51gn", "https%3A%2F%2Fh%2Fx%3F***"),
        ("zip://a.csv::https://h/x.zip?sig=51gn", "zip://a.csv::https://h/x.zip?***"),
        ("see https://h/x#access_token=51gn&k=1.", "see https://h/x#***."),
        ("https://h/x;jsessionid=51gn/y?a=1; then", "https://h/x;***; then"),
        ("https%3A%2F%2Fh%2Fx%23sig%3D51gn", "https%3A%2F%2Fh%2Fx%23***"),
        ("checkpoint.remote=//store.host/a?sig=51gn", "checkpoint.remote=//store.host/a?***"),
        ("//me:pa55@store.host/a", "//***@store.host/a"),
        ("a token hf_abcdefghijklmnopqrst", "a token ***"),
        ("https://h/x?v=1&sig=${SIG}, y", "https://h/x?***&sig=${SIG}, y"),
        ("https://${ME}:${PASS}@h/x?${QUERY}", "https://${ME}:${PASS}@h/x?${QUERY}"),
        ("https://me:${PASS}@h/x", "https://***@h/x"),
    ],
)
def test_the_secrets_of_a_url_are_left_out_and_nothing_else(text, left):
    assert redacted(text) == left and redacted(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "did you mean `x`? yes",
        "notes/?.txt",
        "hf://datasets/org/name@main/x.jsonl",
        "http://127.0.0.1:8000/a@b/x",
        "http://[::1]:8000/a@b/x",
        "http://host:8000?***",
        "https://h/x?***:17 is not JSON",
        "a and/or b?c",
        "https://h/x?",
        "https://h/x#a-heading",
        "s3://bucket/c#/x.jsonl; then a=1",
        "src//module.py?x",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_a_value_from_the_environment_is_left_out_of_every_url_and_of_nothing_else(monkeypatch):
    monkeypatch.setattr(safe_text, "_VALUES", set())
    keep_secret("tok/en+")
    keep_secret("tok")
    keep_secret("")
    assert redacted("see https://h/tok/en+/x, https://tok.h/a%2Ftok%2Fen%2B?v=1: tok") == (
        "see https://h/***/x, https://***.h/a%2F***?***: tok"
    )
    assert redacted("https://h/$" + "{TOKEN}/x") == "https://h/$" + "{TOKEN}/x"
    assert without_secrets({"path": "https://h/tok/x"}) == {"path": "https://h/***/x"}
    assert without_values("Cannot connect to host tok.h:443") == "Cannot connect to host ***.h:443"
    assert secret_values() == ["tok", "tok%2Fen%2B", "tok/en%2B", "tok/en+"]


def test_settings_keep_their_form():
    given = {"a": ["https://h/x?sig=51gn", 3, None], "b": {"c": "https://me:pa55@h/x", "d": True}}
    left = {"a": ["https://h/x?***", 3, None], "b": {"c": "https://***@h/x", "d": True}}
    assert without_secrets(given) == left and given["b"]["c"] == "https://me:pa55@h/x"


def test_control_characters_are_written_out_and_text_stays():
    assert escaped("a\x1b[31mred\x07\tb\n\x7f\x9b\u202e\udcff") == "a\\x1b[31mred\\x07\tb\n\\x7f\\x9b\\u202e\\udcff"
    assert printable("step-é 7\x1b[31m\r\n\t\u202e\udcff") == r"step-é 7\x1b[31m\r\n\t\u202e\udcff"
    text = "Ελλάδα, 日本\u3000語, 👩\u200d🚀, a\u00a0b"
    assert escaped(text) == text


def test_json_keeps_its_value():
    value = {"a": "\x1b[31m\x9b\x7f\u2028\u202eé"}
    line = escaped_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(line) == value
    assert line == '{"a": "\\u001b[31m\\u009b\\u007f\\u2028\\u202eé"}'


def test_every_error_may_be_shown_whatever_it_quotes():
    parts = ("\x1b]0;owned\x07 https://h/x?sig=51gn", "two\nlines", "see https://me:pa55@h/y")
    left = ("\\x1b]0;owned\\x07 https://h/x?***", "two\nlines", "see https://***@h/y")
    for error in (UserError(*parts), BadShard(*parts), SeveralErrors([UserError(*parts)])):
        assert (error.given, error.rule, error.change) == left == error.args
        assert "51gn" not in repr(error) + str(error) and "pa55" not in repr(error) + str(error)


def test_say_prints_what_may_be_shown(capsys):
    stream = io.StringIO()
    say("https://h/x?sig=51gn \x1b[2J", stream)
    say(7)
    assert stream.getvalue() == "https://h/x?*** \\x1b[2J\n" and capsys.readouterr().out == "7\n"
    assert shown("https://h/x?sig=51gn\x07") == "https://h/x?***"  # a control character is part of the word
