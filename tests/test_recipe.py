"""How a recipe is read: numbers as people write them, keys once, and overrides."""

import pytest

from windlass.errors import UserError
from windlass.recipe import apply_override, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e9", 1e9),
        ("2.5e9", 2.5e9),
        ("-1E+3", -1000.0),
        ("1_000e3", 1e6),
        ("1.5e-08", 1.5e-8),
        ("0.1", 0.1),
        ("1_000", 1000),
        ("e5", "e5"),
        ("1e", "1e"),
        ("3e-4 nats", "3e-4 nats"),
        ("'3e-4'", "3e-4"),
        ("", None),
        ("[1e3, a]", [1000.0, "a"]),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    got = parse_yaml(text, "recipe")
    assert got == value and type(got) is type(value)


def test_a_key_given_twice_is_refused_with_its_line_at_every_depth():
    with pytest.raises(UserError, match=r"`a` stands twice \(line 3\)"):
        parse_yaml("a: 1\nb: 2\na: 3\n", "recipe")
    with pytest.raises(UserError, match=r"`beta1` stands twice \(line 4\)"):
        parse_yaml("optim:\n  beta1: 0.8\n  beta2: 0.9\n  beta1: 0.9\n", "recipe")
    with pytest.raises(UserError, match=r"`x` stands twice \(line 1\)"):
        parse_yaml("sources: [{x: 1, x: 1}]", "recipe")
    assert parse_yaml("a: {x: 1}\nb: {x: 1}", "recipe") == {"a": {"x": 1}, "b": {"x": 1}}


def test_what_is_not_yaml_is_refused_with_its_name_and_line():
    with pytest.raises(UserError, match=r"recipe\.yaml is not YAML: .*line 2"):
        parse_yaml("run: {steps: 3\nmodel: ]", "recipe.yaml")
    with pytest.raises(UserError, match="is not YAML"):
        parse_yaml("when: !!python/object:os.system {}", "recipe.yaml")


def test_overrides_have_types_and_make_sections():
    tree = {"run": {"steps": 3}, "report": None}
    for override in (
        "run.steps=1e2",
        "run.name=a=b",
        "optim.deep.x=[0, 5]",
        "report.every=false",
        "seed=7",
        "run.none=",
    ):
        apply_override(tree, override)
    assert tree == {
        "run": {"steps": 100.0, "name": "a=b", "none": None},
        "optim": {"deep": {"x": [0, 5]}},
        "report": {"every": False},
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps", "the override `run.steps`\n  rule:   overrides have the form section.key=value"),
        ("=3", "section.key=value"),
        ("run..steps=3", "section.key=value"),
        ("run.steps.x=3", "`steps` holds a value, not a section"),
        ("run.sources.0.path=x", "`sources` holds a value, not a section"),
        ("run.steps={", "the override `run.steps={` is not YAML"),
    ],
)
def test_an_override_that_cannot_be_is_refused(override, said):
    with pytest.raises(UserError) as caught:
        apply_override({"run": {"steps": 3, "sources": [{"path": "a"}]}}, override)
    assert said in str(caught.value)
