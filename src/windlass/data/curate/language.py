"""The language of a text, by py3langid: a naive Bayes model of byte n-grams (langid.py, Lui and Baldwin 2012), which its wheel
holds.

Half a second loads the model, once per process. The beginning of a text decides, so a long document costs no more than a page.
Another version may hold another model, so the version is part of what filtered data is recognised by (prepare/fingerprint).
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from windlass.errors import UserError, nearest

LOOKED_AT: Final = 2000  # characters


def is_in_another(text: str, wanted: Sequence[str]) -> bool:
    """Whether a text begins in none of these languages."""
    return identifier().classify(text[:LOOKED_AT])[0] not in wanted


@lru_cache(maxsize=1)
def identifier() -> Any:
    """py3langid's. Raises UserError where the package is missing."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise _missing() from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def found_by() -> str:
    """py3langid and its version. Raises UserError where the package is missing."""
    try:
        return f"py3langid {version('py3langid')}"
    except PackageNotFoundError:
        raise _missing() from None


def _missing() -> UserError:
    return UserError(
        "`filters.language`, and py3langid is not installed",
        "a text's language is found by py3langid, and data that it filtered is recognised by its version",
        "pip install 'windlass-lm[curate]'",
    )


def check_languages(wanted: Sequence[str]) -> None:
    """Raises UserError where the package is missing, or does not know one of the languages."""
    known = identifier().labels
    for language in wanted:
        if language not in known:
            raise UserError(
                f"`filters.language` names `{language}`",
                f"a language is one of the {len(known)} codes of py3langid",
                f"{nearest(language, known)}the codes are {', '.join(sorted(known))}",
            )
