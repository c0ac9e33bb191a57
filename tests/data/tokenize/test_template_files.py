"""Whether a tokenizer's files hold a chat template, and whether it reads the clock."""

import json
import re
from pathlib import Path

import pytest

from windlass.data.tokenize.template_files import SIMPLE_TEMPLATE, check_has_template, no_template, on_day, reads_clock
from windlass.errors import UserError


def test_a_template_is_found_in_either_file(tmp_path):
    config, template = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    config.write_text("{}")
    with pytest.raises(UserError) as caught:
        check_has_template([config], "org/name")
    assert caught.value.given == "the tokenizer in org/name has no chat template"
    config.write_text(json.dumps({"chat_template": "x"}))
    check_has_template([config], "org/name")
    config.write_text("{}")
    template.write_text("x")
    check_has_template([config, template], "org/name")
    assert not reads_clock([config, template])
    template.write_text("{{ strftime_now('%Y') }}")
    assert reads_clock([config, template])


def test_what_has_no_template_is_given_one(tmp_path, monkeypatch):
    """A wheel brings no docs to look it up in. A checkpoint's files are hashed: nothing is written beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    step = "runs/my run/checkpoints/step-00000009/tokenizer"
    (tmp_path / step).mkdir(parents=True)
    for where, change in (
        ("base", "use the tokenizer of a chat model, or write these four lines into base/chat_template.jinja"),
        ("org/name", "use the tokenizer of a chat model, or download org/name and write these four lines into "
                     "chat_template.jinja there"),
        (step, "`windlass export 'runs/my run' base`, write these four lines into base/chat_template.jinja, and finetune it: "
               "`windlass init --data CHATS --model base`"),
    ):  # fmt: skip
        error = no_template(where)
        assert error.change == f"{change}:\n{SIMPLE_TEMPLATE}" and "docs/" not in str(error)
    assert len(SIMPLE_TEMPLATE.splitlines()) == 4


@pytest.mark.parametrize("page", ["text-to-chat", "prepare-data"])
def test_the_template_of_the_message_is_that_of_the_pages(page):
    text = (Path(__file__).parents[3] / f"docs/howto/{page}.md").read_text()
    assert re.findall(r"```jinja\n(.*?)\n```", text, re.S) == [SIMPLE_TEMPLATE]


def test_every_call_of_the_clock_says_the_day():
    template = (
        """{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }} {{ strftime_now( '%Y-%m' ) }}{% endif %}"""
    )
    assert (
        on_day(template, "2026-11-21")
        == """{% if strftime_now is defined %}{{ "21 Nov 2026" }} {{ "2026-11" }}{% endif %}"""
    )


@pytest.mark.parametrize(
    "harmless", ["{% if strftime_now is not defined %}x{% endif %}", "{# strftime_now gives\n the day #}"]
)
def test_what_only_asks_for_the_clock_stays(harmless):
    assert on_day(harmless, "2026-11-21") == harmless


@pytest.mark.parametrize(
    "composed",
    [
        """{{ strftime_now("%d" ~ " %b") }}""",
        """{{ strftime_now("%d" if day else "%b") }}""",
        r"""{{ strftime_now("%d\n%b") }}""",
        """{% set clock = strftime_now %}{{ clock("%d") }}""",
        """{{- '{#' if false else '' }}{{ strftime_now(("%d")) }}{# no comment before this one #}""",
    ],
)
def test_a_format_that_is_no_plain_text_is_refused(composed):
    with pytest.raises(UserError, match="the chat template reads the clock by strftime_now"):
        on_day(composed, "2026-11-21")


@pytest.mark.parametrize(
    "draw", ["{{ names | random }}", "{{ names|map('random') }}", "{% set x = lipsum(1) %}{{ x }}"]
)
def test_a_template_that_draws_is_refused(draw):
    for date in (None, "2026-11-21"):
        with pytest.raises(UserError, match="the chat template draws at random by") as caught:
            on_day("{{ bos_token }}" + draw, date)
    assert caught.value.change == "fix the chat template of the tokenizer"
    harmless = "a random {# | random #} word: {{ m.random }} {{ 'random walks' }}"
    assert on_day(harmless, None) == harmless
