"""What every room's config is built on."""

import ast
import pickle
import re
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from windlass import settings
from windlass.config import RunConfig
from windlass.objectives.config import BETA, TARGET_MARGIN, ObjectiveConfig
from windlass.recipe import apply_override
from windlass.settings import BrokenRule, Count, Settings

SOURCE = Path(settings.__file__).parents[1]


class Example(Settings):
    number: int = 1
    share: Annotated[float, Field(gt=0)] | None = None
    """a docstring"""
    word: str | list[str] = ""
    zero: Literal[0, 1] = 0
    flag: bool = False
    maybe: bool | None = None
    other: int = Field(3, alias="async")
    tokens: Count = Field(1, ge=1)
    most: Annotated[Count, Field(le=10**9)] | Literal["auto"] | None = None


@pytest.mark.parametrize(
    ("given", "number"),
    [("1k", 1000), ("300M", 300_000_000), ("1.5B", 1_500_000_000), ("2T", 2 * 10**12), (" 12K ", 12_000), ("7", 7)]
    + [("0.001k", 1), ("1.54G", 1_540_000_000), ("1.0000000001T", 1_000_000_000_100), (5, 5), (1e3, 1000)],
)
def test_counts_are_read_as_people_write_them(given, number):
    assert Example.model_validate({"tokens": given}).tokens == number
    if number <= 10**9:
        assert Example.model_validate({"most": given}).most == number


@pytest.mark.parametrize("given", ["1.5", "1.2345k", "k", "1KB", "1 B", "1e3k", "-1k", "0k", "0.0001k", "²k", "one"])
def test_what_is_no_count_is_refused(given):
    with pytest.raises(ValidationError):
        Example.model_validate({"tokens": given})
    with pytest.raises(ValidationError, match="most"):
        Example.model_validate({"most": "2B"})
    with pytest.raises(ValidationError):
        Example.model_validate({"number": "1k"})


@pytest.mark.parametrize("key", ["number", "share", "word", "zero", "async", "tokens", "most"])
def test_true_is_no_number(key):
    with pytest.raises(ValidationError, match="true is neither"):
        Example.model_validate({key: True})


def test_flags_are_flags():
    assert Example(flag=True, maybe=False) == Example.model_validate({"flag": True, "maybe": False})


def test_frozen_strict_about_keys_finite_and_documented():
    with pytest.raises(ValidationError, match="frozen"):
        Example().number = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        Example.model_validate({"nmber": 3})
    with pytest.raises(ValidationError, match="finite"):
        Example(share=float("inf"))
    assert Example.model_fields["share"].description == "a docstring"
    assert Example(other=4).other == Example.model_validate({"async": 4}).other == 4


def test_a_changed_copy_is_validated_and_the_first_stays():
    first = Example(number=2, other=5)
    assert first.changed(number=7) == Example(number=7, other=5) and first.number == 2
    with pytest.raises(ValidationError, match="number"):
        first.changed(number="many")
    with pytest.raises(ValidationError, match="numbr"):
        first.changed(numbr=1)


def test_a_broken_rule_is_said_with_the_path_of_its_section():
    rule = BrokenRule(
        {"lanes": 4, "order.kind": "x"}, "the rule", "remove .lanes, or set .order.kind=.y (.order.z), 1.a"
    )
    assert str(rule) == "lanes=4 with order.kind=x: the rule; remove lanes, or set order.kind=.y (order.z), 1.a"
    found = rule.at("data.sources[1]")
    assert found.given == "data.sources[1].lanes=4 with data.sources[1].order.kind=x" and found.rule == "the rule"
    assert found.change == (
        "remove data.sources[1].lanes, or set data.sources[1].order.kind=.y (data.sources[1].order.z), 1.a"
    )
    again = pickle.loads(pickle.dumps(rule))
    assert str(again) == str(rule) and again.given == rule.given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": True, "b": None, "c": None}, "at.a=true without at.b or at.c"),
        ({"a": 1, "b": "2", "c": ""}, 'at.a=1 with at.b="2" and at.c=""'),
        ({"": Example(number=3, other=4), "word": None}, "at={number: 3, async: 4} without at.word"),
        ({"a": {"x": [1, 2], "y": Example()}}, "at.a={x: [1, 2], y: {}}"),
        ({"a": None}, "at without at.a"),
        ({"a": "x" * 201}, f"at.a={'x' * 200}..."),
        ({"a": f"s3://me:{'5' * 300}@host/x?sig=7"}, "at.a=s3://***@host/x?***"),
        ({"a": "x\ny"}, 'at.a="x\\ny"'),
    ],
)
def test_what_was_given_is_shown_as_a_recipe_has_it(given, said):
    assert BrokenRule(given, "rule", "change").at("at").given == said


def test_of_some_keys_a_section_has_exactly_one():
    assert list(Example(number=1).exactly_one("an example", "share", "other")) == []
    (rule,) = Example(share=1.0, flag=True).exactly_one("an example", "share", "maybe", "other")
    assert str(
        rule
    ) == "share=1.0 with async=3: an example has exactly one of share, maybe and async; give one of them: " + (
        "share, maybe or async"
    )
    (rule,) = Example(flag=True).exactly_one("an example", "share", "maybe")
    assert str(rule).startswith("{flag: true} without share or maybe: an example has exactly one of share and maybe;")


def sources():
    """File -> its text."""
    return {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def test_no_config_or_record_of_a_checkpoint_is_copied_past_its_rules():
    """pydantic's `model_copy` checks nothing; `changed` validates the copy as a new one is."""
    assert [file for file, text in sources().items() if "model_copy(" in text] == []


def test_a_field_that_the_recipe_has_wrong_is_not_known_and_a_name_that_is_no_field_is_a_bug():
    half = Example.model_construct(number=2)
    del half.__dict__["share"]
    assert (half.known("number"), half.known("share")) == (2, None)
    with pytest.raises(KeyError, match="shares"):
        half.known("shares")


COMPUTED_ONCE = {"RunConfig: model_post_init", "RunConfig: PrivateAttr"}
"""The text that a recipe was given as, which no field holds; it is set while the config is made, and never after."""


def configs():
    """Name -> class statement of every config: what has Settings above it, however far."""
    classes = [
        node for text in sources().values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    found, names = {}, {"Settings"}
    while len(found) < len(names):
        found = {one.name: one for one in classes if one.name in names or names & {ast.unparse(b) for b in one.bases}}
        names = {*names, *found}
    return found


def test_no_config_changes_to_remember_what_it_computed():
    ways = (
        "__setattr__",
        "cached_property",
        "lru_cache",
        "functools.cache",
        "__dict__",
        "model_post_init",
        "PrivateAttr",
    )
    texts = {name: ast.unparse(node) for name, node in configs().items()}
    assert len(texts) > 30 and {"RunConfig", "DataConfig", "ModelConfig"} <= texts.keys()
    assert {f"{name}: {way}" for name, text in texts.items() for way in ways if way in text} == COMPUTED_ONCE
    assert not [file for file, text in sources().items() if "object.__setattr__" in text]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.sequence_length=1k", 1000),
        ("evaluate.sequences=1k", 1000),
        ("data.tokenizer.train=8k", 8000),
        ("checkpoint.keep_steps=[1k, 20]", [1000, 20]),
        ("run.micro_batch=1k", 1000),
    ],
)
def test_counts_that_are_often_large_are_read_in_thousands(override, value):
    tree = {}
    apply_override(tree, override)
    ((section, found),) = tree.items()
    (key, *inner) = override.partition("=")[0].split(".")[1:]
    config = RunConfig.model_fields[section].annotation
    if inner:
        assert getattr(TypeAdapter(config.model_fields[key].annotation).validate_python(found[key]), *inner) == value
    else:
        assert getattr(config.model_validate(MINIMAL.get(section, {}) | found), key) == value


MINIMAL = {
    "run": {"directory": "run", "steps": 5, "tokens_per_step": 64},
    "data": {"sources": [{"path": "a"}], "tokenizer": {"train": 300}, "directory": "data"},
}


def sections(config):
    """`config` and every section inside it, lists and mappings of sections too."""
    yield config
    for field in config.model_fields.values():
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, Settings):
                yield from sections(part)


def parts_of(annotation):
    yield annotation
    for inner in typing.get_args(annotation):
        yield from parts_of(inner)


DEFAULT = re.compile(r"[Dd]efault:? (is )?-?\d|\bby default\b")


def test_no_default_is_written_twice():
    """Beside its field it is in the field; text gives one only where the field's is None, and where a constant holds it."""
    texts = [
        f"{section.__name__}.{name}: {field.description}"
        for section in set(sections(RunConfig))
        for name, field in section.model_fields.items()
        if field.default is not None and DEFAULT.search(field.description or "")
    ]
    configs = [path for path in SOURCE.rglob("*.py") if path.name == "config.py"]
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for path in configs
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3
        if not (isinstance(node.args[2], ast.Constant) and node.args[2].value is None)
    ]
    assert len(configs) > 15 and texts + calls == []
    described = {name: field.description for name, field in ObjectiveConfig.model_fields.items()}
    assert f"default {BETA}:" in described["beta"] and f"default {TARGET_MARGIN}:" in described["target_margin"]
