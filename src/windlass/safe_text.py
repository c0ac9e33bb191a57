r"""Text that may be shown and kept: without the secrets of its URLs, and with nothing in it that drives a terminal. No torch.

A signed URL is a password, and recipes, file systems and servers put URLs into messages. What a URL may hold that is secret is
left out as a whole: user and password, and the query, since every store names its signature otherwise; values in a fragment or
in the path (`#name=`, `;name=`); and what an environment variable, `${NAME}` in a recipe, put into its host or path
(`keep_secret`). The name itself stays: it is no secret. A URL ends at white space, a quote, a backquote or an angle bracket,
which a recipe's URLs therefore never hold (recipe.py).

The doors: every WindlassError, events.jsonl, what is printed (`say`, the console), and `without_secrets` for the settings in
resolved.yaml, checkpoints and prepared data.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

HIDDEN: Final = "***"
_WORD: Final = re.compile(r"[^\s'\"<>`]+")
_SCHEME: Final = re.compile(
    r"[a-z][a-z0-9+.-]{0,15}(?::|%3a)(?:\\?/|%2f)+|(?<![^=(\[,])//(?=[^/?#]*[.@]|localhost)", re.IGNORECASE
)
"""Or a URL without one, `//host.name/...`, as browsers show it."""
_USER: Final = re.compile(
    rf"({_SCHEME.pattern})([^/?#]{{0,999}}|[^/?#@:\[]{{0,99}}:(?!\d+(?:[/?#]|$))\S{{0,999}})@", re.IGNORECASE
)
"""The user of a URL as the standard library reads it: up to the last @ before the path; where a : is no port's, of all."""
_QUERY: Final = re.compile(r"\?|%3f|(?:[;#]|%3b|%23)(?=[\w.~-]+(?:=|%3d))", re.IGNORECASE)
_BEHIND: Final = ",;:.)]}"  # what may follow a URL in a sentence, or in YAML
_REFERENCE: Final = re.compile(r"\$\{\w+\}")
_NO_SECRET: Final = re.compile(rf"(?:[\w.~-]*=)?(?:{_REFERENCE.pattern}|\*\*\*)(?::\d+)?")  # the number is a line's
_HUB_TOKEN: Final = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_VALUES: Final[set[str]] = set()  # the doors see texts alone, which do not say what of them came from the environment
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but tab and newline, separators of lines, turns of the direction, halves of pairs."""


def keep_secret(value: str) -> None:
    """From now on `value` is left out of every URL that this process shows or keeps, percent-encoded or not."""
    import urllib.parse  # which `import windlass` does not need

    quoted = (urllib.parse.quote(value, safe=safe) for safe in ("/", ""))
    _VALUES.update(filter(None, (value, *quoted, urllib.parse.unquote(value))))


def secret_values() -> list[str]:
    """For a further process: what it is to keep secret."""
    return sorted(_VALUES)


def without_values(text: str) -> str:
    """`text` without the values that are kept secret, in a URL or not: a library may name the host of one alone."""
    for value in sorted(_VALUES, key=len, reverse=True):  # one may hold another
        text = text.replace(value, HIDDEN)
    return text


def redacted(text: str) -> str:
    """`text` with the secrets of its URLs, and tokens of the hub, replaced by ***."""
    return _HUB_TOKEN.sub(HIDDEN, _WORD.sub(_without_secrets, text) if "/" in text or "%2" in text else text)


def _without_secrets(found: re.Match[str]) -> str:
    word = _USER.sub(_hide_user, found[0])
    url = _SCHEME.search(word)
    if url is None:
        return word
    mark = _QUERY.search(word, url.end())
    base, query = (word, "") if mark is None else (word[: mark.end()], word[mark.end() :])
    # a reference ends with a brace, as a mapping of YAML does
    least = max((one.end() for one in _REFERENCE.finditer(query)), default=0)
    end = max(least, len(query.rstrip(_BEHIND)))
    parts = [one if _NO_SECRET.fullmatch(one) else HIDDEN for one in query[:end].split("&")]
    kept = HIDDEN if set(parts) == {HIDDEN} else "&".join(parts)
    base = base[: url.end()] + without_values(base[url.end() :])
    return base + kept * (end > 0) + query[end:]


def _hide_user(found: re.Match[str]) -> str:
    is_named = all(_NO_SECRET.fullmatch(one) for one in found[2].split(":"))
    return f"{found[1]}{found[2] if is_named else HIDDEN}@"


def is_raw(text: str) -> bool:
    """Whether a URL in `text` has a user or a password with @, /, ? or # in it: two readers may see two hosts in it."""
    return any(re.search("[@/?#]", user[2]) and "::" not in user[2] for user in _USER.finditer(text))


def without_secrets(value: Any) -> Any:
    """A copy of mappings and lists, with every text in them redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def escaped(text: str) -> str:
    r"""`text` with every control character but tab and newline written out: an ESC as \x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    r"""The escaped text on one line: a newline as \n."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def escaped_json(json: str) -> str:
    r"""Equal JSON, with every control character as \u001b."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json)


def shown(text: str) -> str:
    """`text` as it may be printed: redacted and escaped."""
    return escaped(redacted(text))


def say(text: object, file: TextIO | None = None) -> None:
    """Prints `text` as it may be shown."""
    print(shown(str(text)), file=file or sys.stdout, flush=True)
