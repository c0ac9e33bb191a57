"""Whether a tokenizer's files hold a chat template, and whether it reads the clock."""

import json

import pytest

from windlass.data.tokenize.template_files import check_has_template, on_day, reads_clock
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
