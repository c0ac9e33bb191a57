"""How a recipe is read: numbers as people write them, keys once, and overrides."""

import json
import subprocess
import sys

import pytest

from tests import bombs
from windlass.errors import UserError
from windlass.recipe import apply_override, parse_yaml, recipe_text, with_environment


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
    with pytest.raises(UserError, match=r"`a` is given twice \(line 3\)"):
        parse_yaml("a: 1\nb: 2\na: 3\n", "recipe")
    with pytest.raises(UserError, match=r"`beta1` is given twice \(line 4\)"):
        parse_yaml("optim:\n  beta1: 0.8\n  beta2: 0.9\n  beta1: 0.9\n", "recipe")
    with pytest.raises(UserError, match=r"`x` is given twice \(line 1\)"):
        parse_yaml("sources: [{x: 1, x: 1}]", "recipe")
    assert parse_yaml("a: {x: 1}\nb: {x: 1}", "recipe") == {"a": {"x": 1}, "b": {"x": 1}}


def test_what_is_not_yaml_is_refused_with_its_name_and_line():
    with pytest.raises(UserError, match=r"recipe\.yaml is not YAML: .*line 2"):
        parse_yaml("run: {steps: 3\nmodel: ]", "recipe.yaml")
    with pytest.raises(UserError, match="is not YAML"):
        parse_yaml("when: !!python/object:os.system {}", "recipe.yaml")


@pytest.mark.parametrize(
    ("text", "rule", "change"),
    [
        ("a:\n\tb: 1\n", "YAML indents with spaces", "replace the tabs"),
        ("a: *norm\n", "a bare * begins an alias", "put a pattern into quotes"),
        ("a:\n  b: 1\n    c: 2\n", "the keys of a section begin in one column", "indent the line as those beside it"),
        ("a: b: c\n", "the keys of a section begin in one column, and a text with", "put its text into quotes"),
        ("a: 1\nb 2\n", "a key ends with a colon and a space", "write `key: value` on that line"),
        ('a: "b\nc: 1\n', "a quote that opens a text closes it", "close the quote"),
        ("a: {b: 1\nc: 2\n", "values in {} and [] have commas", "add the comma or the bracket"),
        ("a: [1, 2\nc: 2\n", "values in {} and [] have commas", "add the comma or the bracket"),
        ("a:\n  b: 1\n c: 2\n", "the keys of a section, and the - of a list", "indent the line"),
        ("a: @b\n", "a text that begins with %, @ or ` is in quotes", "put it into quotes"),
        ("a: 1\n---\nb: 2\n", "a recipe is one YAML document", "remove the line of ---"),
    ],
)
def test_what_is_not_yaml_is_answered_with_the_rule_it_breaks(text, rule, change):
    with pytest.raises(UserError, match="is not YAML") as caught:
        parse_yaml(text, "recipe")
    assert caught.value.rule.startswith(rule) and change in caught.value.change


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
        ("run.sources.0.path=x", "`sources` is a list, and an override replaces all of it"),
        ("run.sources.0.path=x", "change: give the whole list: 'run.sources=[{path: ...}]'"),
        ("run.sources[0].path=x", "change: give the whole list: 'run.sources=[{path: ...}]'"),
        ("run.sources.0=x", "change: give the whole list: 'run.sources=[...]'"),
        ("run.steps={", "the override `run.steps={` is not YAML"),
    ],
)
def test_an_override_that_cannot_be_is_refused(override, said):
    with pytest.raises(UserError) as caught:
        apply_override({"run": {"steps": 3, "sources": [{"path": "a"}]}}, override)
    assert said in str(caught.value)


BOMBS = {**bombs.BOMBS, "bits": "a: -9223372036854775808"}
BOMBS |= {
    "wide": f"a: [{'1,' * 400_000}]",
    "long": "a: b\n" + "#" * (1 << 20),
    "sexagesimal": f"a: 1{':1' * 150_000}",
}


@pytest.mark.parametrize(
    ("bomb", "given", "change"),
    [
        ("aliases", "recipe holds 490,329,066 values, aliases (*name) and merges (<<) written out", "without aliases"),
        ("merges", "recipe holds 2,340,428,069 values, aliases", "without aliases"),
        ("flow", "recipe, line 1: values nested more than 30 deep", "remove the nesting"),
        ("blocks", "recipe, line 31: values nested more than 30 deep", "remove the nesting"),
        ("digits", "recipe, line 1: a number of 5000 characters, 999999999999...", "shorten it"),
        ("bits", "recipe, line 1: a number of 20 characters, -92233720368...", "put it into quotes"),
        ("itself", "recipe: a value that holds itself, by an alias", "write out what is meant"),
        ("wide", "recipe holds more than 20,000 values", "a pattern or a folder"),
        ("long", "recipe is 1.0 MiB long", "give the recipe"),
        ("sexagesimal", "recipe, line 1: a number of 300001 characters", "shorten it"),
    ],
)
def test_a_small_text_that_would_become_a_huge_recipe_is_refused(bomb, given, change):
    with pytest.raises(UserError) as caught:
        parse_yaml(BOMBS[bomb], "recipe")
    assert caught.value.given.startswith(given) and change in caught.value.change


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("a: 2001-13-45", "recipe, line 1: '2001-13-45' is no timestamp"),
        ("b: 1\na: !!float x", "recipe, line 2: 'x' is no float"),
        ('a: !!int ""', "recipe, line 1: '' is no int"),
        ("a: !!bool zz", "recipe, line 1: 'zz' is no bool"),
        ("a: !!timestamp foo", "recipe, line 1: 'foo' is no timestamp"),
        ("? !!timestamp foo\n: 1", "recipe, line 1: 'foo' is no timestamp"),
        ("!!map x", "recipe is not YAML: "),
        ("a: !!set x", "recipe is not YAML: "),
    ],
)
def test_a_value_that_is_not_of_its_form_or_tag_is_refused_with_its_line(text, given):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "recipe")
    assert caught.value.given.startswith(given)


def test_a_recipe_of_any_size_is_not_read(tmp_path):
    (tmp_path / "corpus.yaml").write_bytes(b"\xff" * ((1 << 20) + 1))
    with pytest.raises(UserError, match=r"corpus.yaml is 1\.0 MiB long") as caught:
        recipe_text(tmp_path / "corpus.yaml")
    assert caught.value.change == "give the recipe; data go into data.sources"


@pytest.mark.parametrize(("text", "letter"), [('"a\\0b"', r"'\x00', at 1"), ('"\\ud800"', r"'\ud800', at 0")])
def test_what_no_path_can_hold_is_refused_by_its_key(text, letter):
    with pytest.raises(UserError) as caught:
        with_environment(parse_yaml(f"run: {{directory: {text}}}", "recipe"))
    assert caught.value.given == f"run.directory holds the character {letter}"


def test_bombs_cost_no_memory_and_no_torch():
    """In 200 MiB above what an idle process has mapped."""
    code = (
        "import json, resource, sys\nfrom windlass.errors import UserError\nfrom windlass.recipe import parse_yaml\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + (200 << 20),) * 2)\n"
        "for text in json.load(sys.stdin):\n    try:\n        parse_yaml(text, 'recipe')\n    except UserError:\n"
        "        print('refused')\nprint('torch' in sys.modules)"
    )
    texts = json.dumps(list(BOMBS.values()))
    done = subprocess.run([sys.executable, "-c", code], input=texts, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * len(BOMBS) + ["False"], done.stderr


@pytest.mark.parametrize(
    "text", ["adapter.also_train=[*norm*]", "adapter.also_train=[*norm]", "adapter.also_train=*.bias"]
)
def test_a_bare_pattern_is_answered_with_quotes(text):
    with pytest.raises(UserError, match="is not YAML") as caught:
        apply_override({}, text)
    assert caught.value.rule == "a bare * begins an alias in YAML" and '["*norm*"]' in caught.value.change


def test_aliases_and_merges_of_a_usual_size_are_read():
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nlist: [*base, *base]\nbig: 9223372036854775807"
    base = {"a": 1, "b": 2}
    assert parse_yaml(text, "recipe") == {
        "base": base,
        "more": base | {"b": 3},
        "list": [base, base],
        "big": (1 << 63) - 1,
    }


def test_variables_of_the_environment_stand_in_texts_at_every_depth():
    given = {"a": ["${ONE}/${TWO}", 3, None], "b": {"${ONE}": "$ONE {ONE} ${}", "c": "x${ONE}y"}, "d": "${ONE}"}
    got = with_environment(given, environ={"ONE": "1", "TWO": "${ONE}"})
    assert got == {"a": ["1/${ONE}", 3, None], "b": {"${ONE}": "$ONE {ONE} ${}", "c": "x1y"}, "d": "1"}


def test_a_variable_that_is_not_set_is_named_with_its_place():
    with pytest.raises(UserError) as caught:
        with_environment({"data": {"sources": [{"path": "a"}, {"path": "s3://${B}/${NO_SUCH}"}]}}, environ={"B": "b"})
    given = "data.sources[1].path names the environment variable NO_SUCH, which is not set"
    assert caught.value.given == given and "export NO_SUCH" in caught.value.change
    assert with_environment({"a": "${EMPTY}"}, environ={"EMPTY": ""}) == {"a": ""}


@pytest.mark.parametrize("text", ['a: "\\U00110000"', 'a: "\\UFFFFFFFF"', f"%YAML 1.{'9' * 5000}\n---\na: 1"])
def test_what_pyyamls_scanner_cannot_convert_is_refused(text):
    with pytest.raises(UserError, match=r"^r\.yaml holds an escape or a directive that YAML has not") as caught:
        parse_yaml(text, "r.yaml")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ({"slurm": {"environment": {"API_KEY": "${KEY}"}}}, "launch.slurm.environment.API_KEY"),
        ({"slurm": {"setup": ["module load cuda", "export API_KEY=${KEY}"]}}, "launch.slurm.setup[1]"),
        ({"kubernetes": {"environment": {"API_KEY": "x${KEY}"}}}, "launch.kubernetes.environment.API_KEY"),
        ({"sky": {"environment": {"API_KEY": "${KEY}"}}}, "launch.sky.environment.API_KEY"),
    ],
)
def test_scripts_and_manifests_hold_no_value_of_the_environment(key, where):
    with pytest.raises(UserError) as caught:
        with_environment({"launch": key}, environ={"KEY": "s3cr3t"})
    assert caught.value.given == f"{where} names the environment variable KEY"
    assert "would be in the script" in caught.value.rule and "s3cr3t" not in str(caught.value)
    assert "$KEY." in caught.value.change and "launch.sky.secrets" in caught.value.change
    held = {"launch": {"slurm": {"setup": ["export API_KEY=$KEY"], "container": "${KEY}"}}}
    assert with_environment(held, environ={"KEY": "image"})["launch"]["slurm"]["container"] == "image"


@pytest.mark.parametrize("letter", [" ", "\t", "\n", "'", '"', "<", ">", "`"])
def test_a_url_whose_end_messages_could_not_show_is_refused_without_it(letter):
    with pytest.raises(UserError) as caught:
        with_environment({"path": f"https://h/x?sig=5ec{letter}ret"}, environ={})
    with pytest.raises(UserError, match=r"path is a URL that holds white space"):
        with_environment({"path": f"s3://me:5ec{letter}ret@h/x"}, environ={})
    assert caught.value.given.startswith("path is a URL that holds white space") and "ret" not in str(caught.value)
    assert with_environment({"path": f"a{letter}b/c?d"}, environ={}) == {"path": f"a{letter}b/c?d"}


@pytest.mark.parametrize(
    "url",
    [
        "http://me:5ec@ret@host/x",
        "s3://key:5ec/ret@bucket/x",
        "http://me:5ec?ret@host:80/x",
        "http://me:5ec#ret@host/x",
    ],
)
def test_a_user_whose_end_is_not_certain_is_refused_without_a_word_of_it(url):
    with pytest.raises(UserError) as caught:
        with_environment({"sources": [{"path": url}]}, "data")
    assert caught.value.given == "data.sources[0].path is a URL whose user or password holds @, /, ? or #"
    assert "%40 for @" in caught.value.change and "ret" not in str(caught.value)
    assert with_environment("http://me:5ec%40ret@host/a@b?v=1#d") == "http://me:5ec%40ret@host/a@b?v=1#d"
    assert with_environment("hf://datasets/org/name@main/x") == "hf://datasets/org/name@main/x"


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (
            "run:\n  steps 3\n  seed: 1\n",
            "indent the line as those beside it, put its text into quotes, or write `key: value` on the line before it",
        ),
        ("run: {a: 1}}\n", "remove the bracket, or open it"),
        ("run: [1]]\n", "remove the bracket, or open it"),
        ("run: {a: 'it's'}\n", "write it twice, or use the other kind of quote"),
        ("a: 1\n---\nb: 2\n", "remove the line of ---"),
    ],
)
def test_frequent_mistakes_in_yaml_have_an_answer_of_their_own(text, change):
    with pytest.raises(UserError, match="is not YAML") as caught:
        parse_yaml(text, "r.yaml")
    assert caught.value.change.startswith(change), caught.value


def test_yaml_that_is_wrong_is_not_quoted():
    with pytest.raises(UserError) as caught:
        parse_yaml("path: {'https://h/" + "x" * 50 + "?sig=51gn': [", "recipe.yaml")
    assert "51gn" not in str(caught.value) and "(line 1, column " in caught.value.given


def test_a_tab_in_a_recipe_is_answered_with_spaces():
    with pytest.raises(UserError, match="is not YAML") as caught:
        parse_yaml("run:\n\tsteps: 3\n", "a.yaml")
    assert caught.value.change == "replace the tabs of that line by spaces" and "line 2" in caught.value.given


def not_found(path):
    with pytest.raises(UserError) as caught:
        recipe_text(path)
    return caught.value


def test_a_directory_is_answered_with_the_recipe_that_may_be_meant(tmp_path):
    assert not_found(tmp_path).change == "give the recipe's file"
    (tmp_path / "mine.yaml").write_text("run: {}")
    error = not_found(tmp_path)
    assert (error.given, error.change) == (f"{tmp_path} is a directory", f"give one of {tmp_path}/mine.yaml")
    (tmp_path / "resolved.yaml").write_text("run: {}")
    assert not_found(tmp_path).change == f"to go on with the run in it: windlass train {tmp_path}/resolved.yaml"
    (tmp_path / "resolved.yaml").write_text("data: {directory: s3://***@host/x}")
    assert "give the recipe that it began with" in not_found(tmp_path).change


def test_a_typo_in_a_path_is_answered_with_the_recipe_beside_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("run: {}")
    (tmp_path / "mine.yam").write_text("no recipe")
    assert not_found(tmp_path / "mine.yml").change.startswith(
        f"did you mean `{tmp_path}/mine.yaml`? `windlass init` writes one; shipped: demo"
    )
    assert not_found(tmp_path / "demoo.yaml").change.startswith("did you mean `demo`? "), "none is near beside it"
    assert not_found("demoo").change.startswith("did you mean `demo`? ")
