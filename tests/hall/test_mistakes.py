"""One error lists every mistake of a recipe: which rules can be judged beside wrong values, in which order, in whose words."""

import re

import pytest

from tests.hall.test_config import TREE, tree
from windlass.config import RunConfig, check_recipe
from windlass.errors import SeveralErrors, UserError


def refused(recipe):
    with pytest.raises(UserError) as caught:
        check_recipe(recipe)
    return caught.value


def givens(error):
    return [one.given for one in (error.errors if isinstance(error, SeveralErrors) else (error,))]


def test_all_mistakes_are_listed_at_once_in_the_recipes_order():
    """Nine, in four sections: wrong keys and values, a missing key, and rules inside a section and between two."""
    recipe = tree(
        run={"stepz": 3, "start_what": "all", "micro_batch": "two"},
        model={"num_hidden_layers": "many"},
        data={"sequence_length": None, "sources": [{"path": 5}, {"hub": "a/b", "rows": "x"}]},
        optim={"decay_fraction": 0.5, "warmup_steps": 101},
    )
    error = refused(recipe)
    assert givens(error) == [
        "run.stepz",
        "run.micro_batch='two'",
        "run.start_what=all without run.start_from",
        "model: num_hidden_layers: 'many'",
        "data.sources[0].path=5",
        "data.sources[1].rows=x",
        "data.sequence_length is missing",
        "optim.decay_fraction=0.5 with optim.schedule=cosine",
        "optim.warmup_steps=101 in a run of 100 steps",
    ]
    first, *lines = str(error).splitlines()
    assert first == "9 mistakes" and len(lines) == 9
    complaint = "run.micro_batch must be a whole number or 'auto'; `windlass keys run.micro_batch` explains the key"
    assert lines[1] == f"  run.micro_batch='two': {complaint}"
    assert lines[4].startswith("  data.sources[0].path=5: data.sources[0].path must be text or a list; ")


@pytest.mark.parametrize(
    "wrong", [{"bucket_mib": -1}, {"zero": 7}, {"shard": "x"}, {"schedule": "zzz"}, {"context": "many"}]
)
def test_a_wrong_setting_of_the_layout_hides_only_the_rules_that_read_it(wrong):
    error = refused(tree(parallel={"tp": 3, **wrong}))
    ((key, _),) = wrong.items()
    assert [given.partition("=")[0].split(" ")[0] for given in givens(error)][:2] == [f"parallel.{key}", "parallel.tp"]


def test_a_rule_that_reads_a_wrong_value_is_not_judged_and_the_others_are():
    error = refused(tree(run={"steps": "many", "start_what": "all"}, parallel={"tp": "two", "context": 3}))
    assert givens(error) == [
        "run.steps='many'",
        "run.start_what=all without run.start_from",
        "parallel.tp='two'",
    ], "neither that no length is given nor a schedule or a layout without its tp is a mistake"
    error = refused(
        tree(run={"tokens_per_step": 100}, model={"family": "qwen"}, parallel={"tp": 3}, optim={"beta1": 2})
    )
    assert givens(error) == [
        "model.family: qwen",
        "optim.beta1=2",
        "run.tokens_per_step=100 with data.sequence_length=16",
        "data.sequence_length=16 with parallel.tp=3",
    ], "a layout is judged without a model that is wrong"


def test_a_wrong_micro_batch_of_pairs_is_one_mistake():
    """It is not taken for 1, which pairs would be refused."""
    pairs = {"sources": [{"path": "pairs.jsonl", "format": "preference"}]}
    error = refused(tree(run={"micro_batch": "two"}, objective={"kind": "dpo"}, data=pairs))
    assert givens(error) == ["run.micro_batch='two'"]


def test_mistakes_follow_the_recipe_and_not_the_order_of_the_sections():
    recipe = {"optim": {"beta2": "x", "beta1": "y"}, "zzz": {}, **tree(run={"seed": -1})}
    assert givens(refused(recipe)) == ["optim.beta2='x'", "optim.beta1='y'", "zzz", "run.seed=-1"]


def test_a_section_that_is_no_mapping_hides_no_other():
    error = refused(tree(run={"seed": -1}) | {"optim": 5, "data": None})
    assert givens(error) == ["run.seed=-1", "data=null", "optim=5"]
    assert error.errors[1].rule == "data must be a mapping of keys"


def test_every_violated_rule_of_a_source_and_every_wrong_field_of_a_model_is_listed():
    model = {"num_hidden_layers": "many", "hidden_size": 0, "use_cache": True, "hidden_sise": 3}
    error = refused(
        tree(model=model, data={"sources": [{"path": "x", "subset": "s", "rows": "y"}], "validation": {"pth": 1}})
    )
    assert givens(error) == [
        "model: hidden_sise: 3",
        "model: use_cache: true",
        "model: hidden_size: 0",
        "model: num_hidden_layers: 'many'",
        "data.sources[0].subset=s without data.sources[0].hub",
        "data.sources[0].rows=y",
        "data.validation.pth",
    ]
    assert error.errors[4].change == "remove data.sources[0].subset"
    assert givens(refused(tree(model={"num_hidden_layers": "many", "hidden_size": 0}))) == [
        "model: hidden_size: 0",
        "model: num_hidden_layers: 'many'",
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, "data.deduplicate.similarity is missing"), ({"similarity": 0.8, "foo": 1}, "data.deduplicate.foo")],
)
def test_of_a_flag_or_a_mapping_the_one_that_is_given_is_judged(given, named):
    assert givens(refused(tree(data={"deduplicate": given}))) == [named]


RULES = [
    (
        {"data": {"cache": {"directory": "c", "limit_mib": 5}}},
        "data.cache={directory: c, limit_mib: 5} with data.directory=runs/x/data",
        "a local directory is read in place, and `cache` has no effect",
        "remove data.cache",
    ),
    (
        {"data": {"sources": [{"path": "a"}, {"path": "b", "split": "test"}]}},
        "data.sources[1].split=test without data.sources[1].hub",
        "it is for a dataset of `hub`, and has no effect without one",
        "remove data.sources[1].split",
    ),
    (
        {"data": {"sources": [{"path": "a", "format": "chat", "rows": {"shape": "alpaca", "prompt": "q"}}]}},
        "data.sources[0].rows.shape=alpaca with data.sources[0].rows.prompt=q",
        "a known shape gives all names",
        "remove data.sources[0].rows.shape, or data.sources[0].rows.prompt",
    ),
    (
        {"data": {"sources": [{"path": "a", "format": "jsonl"}]}},
        "data.sources[0].format=jsonl",
        "`format` says what a row is, and this is what a file is",
        "set data.sources[0].file_format=jsonl in its place",
    ),
    (
        {"data": {"validation": {"path": "v", "bad_rows": {"at_most": {"at": 1}}}}},
        "data.validation.bad_rows.at_most={at: 1}",
        "the limit is a count (a whole number, 0 or more) or a share (a decimal between 0 and 1)",
        "set data.validation.bad_rows.at_most=10 for ten rows, or data.validation.bad_rows.at_most=0.01 for one row in a hundred",
    ),
    (
        {"evaluate": {"sets": {"news": {"path": "a", "hub": "b/c"}}}},
        "evaluate.sets.news.path=a with evaluate.sets.news.hub=b/c",
        "a source has exactly one of path, hub and builtin",
        "give one of them: evaluate.sets.news.path, evaluate.sets.news.hub or evaluate.sets.news.builtin",
    ),
    (
        {"evaluate": {"sets": {"path": {"path": ""}}}},  # a set of the name of a key
        'evaluate.sets.path.path=""',
        "`path` names the documents, and is empty",
        "give a file, a directory, a glob or a name as evaluate.sets.path.path",
    ),
    (
        {"run": {"directory": "s3://me:pa55@b/x"}},
        "run.directory=s3://***@b/x",
        "a run writes to a local directory, and this is a URL",
        "give a local directory as run.directory; checkpoint.remote takes a URL, for copies of checkpoints",
    ),
    (
        {"launch": {"slurm": {"time": 3600}}},
        "launch.slurm.time=3600",
        "this is not a time limit in quotes, and YAML reads 1:00:00 as 3600",
        'write time: "1:00:00" in a recipe, and \'launch.slurm.time="1:00:00"\' on a command line',
    ),
]


@pytest.mark.parametrize(("sections", "given", "rule", "change"), RULES)
def test_a_rule_of_a_section_that_does_not_know_its_path_is_answered_with_it(sections, given, rule, change):
    """Alone, and listed beside another mistake."""
    alone = refused(tree(**sections))
    (listed, other) = refused(tree(**sections, optim={"beta1": 2})).errors
    for error in (alone, listed):
        assert (error.given, error.rule, error.change) == (given, rule, change)
    assert other.given == "optim.beta1=2"


def test_another_tools_keys_are_one_mistake_beside_the_others():
    recipe = tree(parallel={"strategy": "FULL_SHARD", "cpu_offload": True, "tq": 2}, precision={"policy": "bf16-mixed"})
    assert givens(refused(recipe | {"zzz": 1})) == [
        "parallel.strategy=FULL_SHARD; parallel.cpu_offload=true",
        "parallel.tq",
        "precision.policy=bf16-mixed",
        "zzz",
    ]


WRONG = ("x", 1.5, -1, 0, 1e400, [], {}, [5], {"x": 1}, True, None, "", 10**30)
PYDANTICS = re.compile(
    r"[Ii]nput should|[Vv]alue error|[Uu]nable to|Extra inputs|Field required|valid (integer|number|string)|type="
)


@pytest.mark.parametrize("section", [name for name in RunConfig.model_fields if name != "model"])
def test_no_wrong_value_is_answered_in_pydantics_words(section):
    """Each of a dozen wrong values under each key of a section; many are right for some keys."""
    num_refused = 0
    for key, field in RunConfig.model_fields[section].annotation.model_fields.items():
        for value in WRONG:
            recipe = tree()
            recipe[section] = {**recipe.get(section, {}), field.alias or key: value}
            try:
                check_recipe(recipe)
            except UserError as error:
                num_refused += 1
                assert not PYDANTICS.search(str(error)), error
                assert f"{section}" in error.given
    assert num_refused > 0
    assert check_recipe(TREE).run.steps == 100
