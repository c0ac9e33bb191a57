"""The language of a text: by a library that is an extra, and by the begin of the text."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.data.conftest import refusal
from windlass.data.curate import language as room
from windlass.data.curate.config import FiltersConfig
from windlass.data.curate.filters import Filters
from windlass.errors import UserError

TEXTS = {
    "en": "The capstan and the windlass raise the anchor, and four sailors turn them.",
    "de": "Das Ankerspill hebt den Anker, und vier Matrosen drehen es mit langen Stangen.",
    "fr": "Le guindeau remonte l'ancre du navire, et quatre marins le font tourner.",
    "ru": "Брашпиль поднимает якорь корабля, и четыре матроса вращают его.",
    "zxx": "12345 678 90 -- 11 ++ 12",
}


@pytest.mark.parametrize("wanted", ["de", ["de", "ru"], ["zxx"]])
def test_texts_in_other_languages_are_removed_and_counted(wanted):
    filters = Filters(FiltersConfig(language=wanted), "a")
    filters.check(print)
    kept = [code for code in TEXTS if code in wanted]
    assert list(filters.kept(TEXTS.values())) == [TEXTS[code] for code in kept]
    assert filters.counts == {"language": len(TEXTS) - len(kept)}


def test_the_begin_of_a_text_decides(monkeypatch):
    assert not room.is_in_another(TEXTS["de"] + TEXTS["ru"] * 9, ["ru"])
    monkeypatch.setattr(room, "LOOKED_AT", len(TEXTS["de"]))
    assert room.is_in_another(TEXTS["de"] + TEXTS["ru"] * 9, ["ru"])


def test_a_language_that_is_not_known_is_refused_with_the_nearest_and_all():
    with pytest.raises(UserError) as caught:
        Filters(FiltersConfig(language=["en", "english"]), "a").check(print)
    assert caught.value.given == "`filters.language` names `english`"
    assert caught.value.rule == f"a language is one of the {len(room.identifier().labels)} codes of py3langid"
    assert "the codes are ace, af, am, " in caught.value.change


@pytest.mark.parametrize(("language", "shown"), [("", '""'), ([], "[]"), (["en", ""], "['en', '']")])
def test_no_language_is_refused(language, shown):
    rule = "no document has an empty language, and none is left"
    assert f"language={shown}: {rule}; give a code, such as language=en, or remove language" in refusal(
        FiltersConfig, {"language": language}
    )


def test_where_the_package_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    room.identifier.cache_clear()
    with pytest.raises(UserError) as caught:
        Filters(FiltersConfig(language="en"), "a").check(print)
    assert caught.value.given == "`filters.language`, and py3langid is not installed"
    assert caught.value.change == "pip install 'windlass-lm[curate]'"
    Filters(FiltersConfig(min_chars=2), "a").check(print)


def test_a_version_that_is_not_there_names_the_extra_too(monkeypatch):
    assert room.found_by() == f"py3langid {version('py3langid')}"

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(room, "version", missing)
    with pytest.raises(UserError) as caught:
        room.found_by()
    assert caught.value.given == "`filters.language`, and py3langid is not installed"
    assert caught.value.change == "pip install 'windlass-lm[curate]'"


def test_nobody_loads_it_who_does_not_ask_for_it():
    code = "import sys, windlass.data.curate.filters; print('py3langid' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
