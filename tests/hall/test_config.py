"""Recipes in, a checked RunConfig out: what each mistake says, that the remedies it names work, and that a dump loads again."""

import copy
import re

import pytest
import yaml

from windlass.config import RunConfig, check_recipe, load_recipe, to_yaml
from windlass.errors import UserError
from windlass.model.flops import count_parameters
from windlass.recipe import shipped_recipes
from windlass.training.start.drift import FREE, _flat, drift
from windlass.units import counted

TREE = {
    "run": {"directory": "runs/x", "steps": 100, "tokens_per_step": 64},
    "model": {
        "family": "qwen3",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
    },
    "data": {
        "sources": [{"path": "text.txt"}],
        "tokenizer": {"train": 300},
        "directory": "runs/x/data",
        "sequence_length": 16,
    },
}


def tree(**sections):
    """The smallest recipe; `sections` are merged key by key, a value of None removes the key."""
    made = copy.deepcopy(TREE)
    for section, keys in sections.items():
        merged = {**made.get(section, {}), **keys}
        made[section] = {key: value for key, value in merged.items() if value is not None}
    return made


def refused(**sections):
    with pytest.raises(UserError) as caught:
        check_recipe(tree(**sections))
    return caught.value


@pytest.fixture
def write(tmp_path):
    """write(text) -> a recipe file; write() -> the smallest recipe."""

    def make(text=None):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(TREE) if text is None else text)
        return file

    return make


# ---- keys and types

UNKNOWN = {
    "section": ("optin", {"optin": {"learning_rate": 1e-3}}, "the recipe", "optim"),
    "key": ("optim.learning_rte", {"optim": {"learning_rte": 1e-3}}, "optim", "learning_rate"),
    "alias": ("checkpoint.asynch", {"checkpoint": {"asynch": True}}, "checkpoint", "async"),
    "second depth": ("data.tokenizer.trian", {"data": {"tokenizer": {"trian": 300}}}, "data.tokenizer", "train"),
    "in a list": ("data.sources[0].pth", {"data": {"sources": [{"pth": "a"}]}}, "data.sources[0]", "path"),
    "in a named set": (
        "evaluate.sets.code.pth",
        {"evaluate": {"sets": {"code": {"pth": "a"}}}},
        "evaluate.sets.code",
        "path",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_names_the_nearest(case):
    path, sections, where, meant = UNKNOWN[case]
    error = refused(**sections)
    assert path in error.given.split("; ")
    assert f"{where} has no key `{path.rpartition('.')[2]}`" in error.rule
    assert f"did you mean `{meant}`?" in error.change and f"keys of {where}:" in error.change


def test_an_unknown_model_field_names_the_nearest():
    assert "hidden_size" in refused(model={"hidden_sise": 24}).change


def test_a_missing_key_is_named_with_its_path():
    error = refused(data={"sequence_length": None})
    assert error.given == "data.sequence_length is missing" and error.change == "add data.sequence_length to the recipe"
    with pytest.raises(UserError, match=r"^model is missing"):
        check_recipe({section: keys for section, keys in TREE.items() if section != "model"})


@pytest.mark.parametrize(
    ("sections", "given", "rule"),
    [
        ({"run": {"steps": "many"}}, "run.steps='many'", "run.steps must be a whole number"),
        ({"run": {"steps": 1.5}}, "run.steps=1.5", "run.steps must be a whole number"),
        ({"run": {"steps": True}}, "run.steps=true", "true is neither"),
        ({"run": {"steps": 0}}, "run.steps=0", "run.steps must be at least 1"),
        ({"optim": {"learning_rate": -1.0}}, "optim.learning_rate=-1.0", "must be greater than 0"),
        ({"optim": {"learning_rate": float("nan")}}, "optim.learning_rate=nan", "must be finite"),
        ({"optim": {"learning_rate": True}}, "optim.learning_rate=true", "true is neither"),
        ({"optim": {"schedule": "step"}}, "optim.schedule='step'", "must be 'cosine', 'wsd', 'linear' or 'constant'"),
        ({"data": {"validation": "off"}}, "data.validation='off'", "{tokens: ...}, or a source as {path: ...}"),
        ({"parallel": {"zero": 7}}, "parallel.zero=7", "must be 0, 1, 2 or 3"),
    ],
)
def test_a_wrong_value_is_shown_with_its_rule(sections, given, rule):
    error = refused(**sections)
    assert given in error.given and rule in error.rule and "windlass keys" in error.change


@pytest.mark.parametrize(
    ("parallel", "change"),
    [
        (
            {"schedule": "interleaved"},
            "did you mean `interleaved-1f1b`? `windlass keys parallel.schedule` explains the key",
        ),
        (
            {"context_kind": "all-gather"},
            "did you mean `allgather`? `windlass keys parallel.context_kind` explains the key",
        ),
        ({"context_kind": "ring"}, "`windlass keys parallel.context_kind` explains the key"),
        ({"tp": "two"}, "`windlass keys parallel.tp` explains the key"),
    ],
)
def test_a_wrong_name_among_few_has_the_nearest_where_one_is_near(parallel, change):
    assert refused(parallel=parallel).change == change


# ---- files


def test_numbers_with_an_exponent_are_numbers(write):
    text = yaml.safe_dump(TREE).replace("steps: 100", "tokens: 1e9") + "optim: {learning_rate: 3e-4, epsilon: 1e-08}\n"
    config = load_recipe(write(text), "optim.weight_decay=1e-1")
    assert (config.run.tokens, config.optim.learning_rate, config.optim.epsilon) == (10**9, 3e-4, 1e-8)
    assert config.optim.weight_decay == 0.1
    assert load_recipe(write(), "run.steps=null", "run.tokens=2.5e9").run.tokens == 2_500_000_000


def test_a_recipe_that_is_no_mapping_is_refused(write):
    with pytest.raises(UserError, match="holds list"):
        load_recipe(write("- run\n- model\n"))
    with pytest.raises(UserError, match=r"recipe\.yaml is empty"):
        load_recipe(write(""))
    with pytest.raises(UserError, match=r"recipe\.yaml is not YAML: .*line 2"):
        load_recipe(write("run: {steps: 3\nmodel: ]"))


def test_overrides_replace_the_recipes_values_and_are_kept_with_it(write):
    config = load_recipe(write(), "optim.beta1=0.5", "checkpoint.async=false", "checkpoint.keep_steps=[0, 5]")
    assert (config.optim.beta1, config.checkpoint.async_, config.checkpoint.keep_steps) == (0.5, False, [0, 5])
    assert config.recipe.startswith("# override: optim.beta1=0.5\n# override: checkpoint.async=false\n")
    assert config.recipe.endswith(yaml.safe_dump(TREE))
    with pytest.raises(UserError, match="did you mean `steps`"):
        load_recipe(write(), "run.stepz=3")


def test_a_text_is_the_recipe_that_its_file_is(write):
    from windlass import load_recipe, parse_recipe

    text = yaml.safe_dump(TREE)
    assert parse_recipe(text).model_dump() == load_recipe(write(text)).model_dump()
    assert parse_recipe(text, "mine", "run.steps=7").run.steps == 7 and parse_recipe(text).recipe == text
    with pytest.raises(UserError, match=r"^mine holds list\n"):
        parse_recipe("- run\n", "mine")
    with pytest.raises(UserError, match=r"^the recipe is not YAML"):
        parse_recipe("run: {")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(b"run: \xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        load_recipe(file)


def test_a_missing_recipe_names_the_nearest_shipped(tmp_path):
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "deom.yaml")
    assert "no recipe at" in caught.value.given
    assert "did you mean `demo`?" in caught.value.change and "gpt2-124m" in caught.value.change


# ---- between settings


def test_a_length_is_given_exactly_once():
    assert "run has steps and tokens" in refused(run={"tokens": 10}).given
    assert "none of steps, tokens, epochs" in refused(run={"steps": None}).given
    for length in ({"steps": 3}, {"tokens": 1000}, {"epochs": 0.5}):
        check_recipe(tree(run={"steps": None, **length}))


@pytest.mark.parametrize(("tokens", "choices"), [(100, [96, 112]), (65, [64, 80]), (5, [16])])
def test_tokens_per_step_that_cut_a_sequence_name_the_nearest_that_do_not(tokens, choices):
    error = refused(run={"tokens_per_step": tokens})
    assert error.rule == f"a global batch is whole sequences, and {tokens} = {tokens // 16} x 16 + {tokens % 16}"
    assert [int(n) for n in re.findall(r"\d+", error.change)] == choices
    for choice in choices:
        assert check_recipe(tree(run={"tokens_per_step": choice})).sequences_per_step == choice // 16


def choices_of(error):
    """The values that an accumulation error names -> (tokens_per_step, micro_batch)."""
    tokens, _, micros = error.change.partition("; or, keeping it, run.micro_batch=")
    return [int(n) for n in re.findall(r"\d+", tokens)], [int(n) for n in re.findall(r"\d+", micros)]


@pytest.mark.parametrize(
    ("sequences", "micro", "batch_ranks"),
    [(512, 4, 24), (48, 4, 24), (96, 16, 24), (7, 1, 24), (512, 3, 8), (12, 8, 2), (8, 3, 1)],
)
def test_a_batch_that_does_not_divide_names_choices_that_do(sequences, micro, batch_ranks):
    run = {"tokens_per_step": sequences * 16, "micro_batch": micro}
    with pytest.raises(UserError) as caught:
        check_recipe(tree(run=run)).accumulation(batch_ranks)
    assert f"({sequences} sequences) on {counted(batch_ranks, 'rank')} with" in caught.value.given
    assert f"= {micro * batch_ranks}" in caught.value.rule
    tokens, micros = choices_of(caught.value)
    assert tokens
    for choice in tokens:
        rounds = check_recipe(tree(run={**run, "tokens_per_step": choice})).accumulation(batch_ranks)
        assert rounds * micro * batch_ranks * 16 == choice
    for choice in micros:
        rounds = check_recipe(tree(run={**run, "micro_batch": choice})).accumulation(batch_ranks)
        assert rounds * choice * batch_ranks == sequences
    assert bool(micros) == (sequences % batch_ranks == 0), "where some micro-batch works, it is named"


def test_accumulation_follows_from_the_global_batch():
    config = check_recipe(tree(run={"tokens_per_step": 48 * 16, "micro_batch": 2}))
    assert [config.accumulation(n) for n in (1, 2, 4, 8, 24)] == [24, 12, 6, 3, 1]


def test_a_warm_up_longer_than_the_run_is_refused_and_the_remedy_works():
    for length in ({"steps": 100}, {"steps": None, "tokens": 6400}):
        error = refused(run=length, optim={"warmup_steps": 101})
        assert "optim.warmup_steps=101" in error.given and "within the run" in error.rule
        assert "use optim.warmup_steps=5," in error.change
        check_recipe(tree(run=length, optim={"warmup_steps": 5}))
        check_recipe(tree(run=length, optim={"warmup_steps": 100}))


def test_a_warm_up_that_reaches_into_the_decay_is_refused_and_the_remedy_works():
    for fraction, decay, remedy in ((0.2, 20, 5), (0.98, 98, 2), (1.0, 100, 0)):
        wsd = {"schedule": "wsd", "decay_fraction": fraction}
        error = refused(optim={**wsd, "warmup_steps": 101 - decay})
        assert f"in a run of 100 steps, the last {decay} of which decay" in error.given
        assert "before the decay begins" in error.rule and f"use optim.warmup_steps={remedy}," in error.change
        check_recipe(tree(optim={**wsd, "warmup_steps": remedy}))
        check_recipe(tree(optim={**wsd, "warmup_steps": 100 - decay}))


# ---- dumps


DUMPED = [
    {},
    {"parallel": {"zero": 0}},
    {"parallel": {"replicate": -1}},
    {"parallel": {"replicate": 2, "shard": 4, "zero": 2}},
    {"optim": {"schedule": "wsd"}},
    {"optim": {"schedule": "wsd", "decay_fraction": 0.3}},
    {"run": {"start_from": "runs/y", "start_what": "all", "accept_drift": ["optim.beta1"]}},
    {"run": {"steps": None, "epochs": 1.5}},
    {"evaluate": {"sets": {"code": {"path": ["a", "b"]}}}, "checkpoint": {"async": False, "every_minutes": 3}},
    {"data": {"validation": {"path": "held-out"}, "tokenizer": {"from": "tok", "train": None}}},
    {"model": {"family": None, "preset": "gpt2-124m", "hidden_size": None, "num_hidden_layers": None,
               "num_attention_heads": None, "head_dim": None, "num_key_value_heads": None, "intermediate_size": None,
               "max_position_embeddings": None}},
]  # fmt: skip


@pytest.mark.parametrize("sections", DUMPED, ids=str)
def test_a_dump_loads_as_the_same_config(write, sections):
    config = check_recipe(tree(**sections))
    again = load_recipe(write(to_yaml(config)))
    assert again.model_dump() == config.model_dump()
    assert to_yaml(again) == to_yaml(config)
    for world in (1, 2, 8):
        assert layout_or_refusal(again, world) == layout_or_refusal(config, world)
    plain = config.model_dump(mode="json", by_alias=True)  # what a checkpoint keeps
    assert check_recipe(plain).model_dump() == config.model_dump()
    assert drift(plain, again.model_dump(mode="json", by_alias=True)) == []


def layout_or_refusal(config, world):
    try:
        return config.parallel.layout(world)
    except UserError as error:
        return str(error)


def test_a_config_never_changes():
    config = check_recipe(tree())
    for holder, name in ((config, "optim"), (config.run, "steps"), (config.parallel, "zero"), (config.model, "family")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(holder, name, None)


# ---- drift


def dumped(**sections):
    return check_recipe(tree(**sections)).model_dump(mode="json", by_alias=True)


MAY_CHANGE = {
    "launch": {"launch": {"stall_s": 7.0}},
    "run.directory": {"run": {"directory": "elsewhere"}},
    "run.steps": {"run": {"steps": 200}},
    "run.tokens": {"run": {"steps": None, "tokens": 6400}},
    "run.epochs": {"run": {"steps": None, "epochs": 2.0}},
    "run.micro_batch": {"run": {"micro_batch": 2}},
    "run.deterministic": {"run": {"deterministic": True}},
    "run.flash_attention": {"run": {"flash_attention": 3}},
    "run.start_from": {"run": {"start_from": "runs/y"}},
    "run.start_what": {"run": {"start_from": "runs/y", "start_what": "all"}},
    "run.accept_drift": {"run": {"accept_drift": ["run.seed"]}},
    "adapter.from": {"adapter": {"from": "adapters/y"}},
    "data.directory": {"data": {"directory": "elsewhere"}},
    "data.cache": {"data": {"cache": {"directory": "/other/disk", "limit_mib": 20}}},
    "data.compression": {"data": {"compression": "zstd"}},
    "data.workers": {"data": {"workers": 3}},
    "data.max_bad_shards": {"data": {"max_bad_shards": 2}},
    "data.timeout_s": {"data": {"timeout_s": 7.0}},
    "data.order.deadline_s": {"data": {"order": {"first_epoch": "written", "deadline_s": 7.0}}},
    "parallel": {"parallel": {"zero": 2, "shard": 2, "recompute": "full"}},
    "optim.max_skips": {"optim": {"max_skips": 7}},
    "checkpoint": {"checkpoint": {"every_steps": 7}},
    "evaluate": {"evaluate": {"sequences": 3}},
    "report": {"report": {"every_steps": 1}},
    "hub": {"hub": {"cache": "/other/disk"}},
}
"""key of drift.FREE -> sections in which it has another value than in those of BEFORE."""
OF_A_BASE = dict.fromkeys(TREE["model"]) | {"from": "base"}
BEFORE = {
    "run.flash_attention": {"data": {"isolate": True}, "precision": {"policy": "bf16"}},
    "adapter.from": {"adapter": {"kind": "lora"}, "model": OF_A_BASE},
    "hub": {"data": {"tokenizer": {"from": "org/name"}}},
    "data.cache": {"data": {"directory": "s3://bucket/run", "cache": {"directory": "/disk", "limit_mib": 10}}},
    "data.order.deadline_s": {"data": {"order": {"first_epoch": "written"}, "validation": "none"}},
}


def merged(*trees):
    found = {}
    for one in trees:
        for section, keys in one.items():
            found[section] = {**found.get(section, {}), **keys}
    return found


def test_every_key_that_may_change_has_a_row():
    assert sorted(FREE) == sorted(MAY_CHANGE)


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_what_trains_the_same_may_change(key):
    before = BEFORE.get(key, {})
    then, now = dumped(**before), dumped(**merged(before, MAY_CHANGE[key]))
    old, new = dict(_flat(then)), dict(_flat(now))
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    assert any(name == key or name.startswith(f"{key}.") for name in changed), "the row changes its key"
    assert drift(then, now) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"seed": 1}}, "run.seed: 0 in the checkpoint, 1 now"),
        ({"run": {"tokens_per_step": 128}}, "run.tokens_per_step: 64 in the checkpoint, 128 now"),
        ({"optim": {"beta1": 0.8}}, "optim.beta1: 0.9 in the checkpoint, 0.8 now"),
        ({"precision": {"policy": "bf16"}}, "precision.policy: auto in the checkpoint, bf16 now"),
        ({"model": {"rope_theta": 5e5}}, "model.rope_theta: None in the checkpoint, 500000.0 now"),
        ({"data": {"sequence_length": 32}}, "data.sequence_length: 16 in the checkpoint, 32 now"),
        ({"data": {"tokenizer": {"train": 400}}}, "data.tokenizer.train: 300 in the checkpoint, 400 now"),
        ({"data": {"validation": 0.5}}, "data.validation: 0.02 in the checkpoint, 0.5 now"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_trains_something_else_is_named_with_both_values(sections, said):
    assert [str(item) for item in drift(dumped(), dumped(**sections))] == [said]
    assert [item.key for item in drift(dumped(**sections), dumped())] == [said.partition(":")[0]]


# ---- what ships

SIZES = {"demo": 1_049_984, "gpt2-124m": 124_439_808, "qwen3-moe-tiny": 464_928}


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_have_the_size_they_say(name):
    config = load_recipe(name)
    assert load_recipe(shipped_recipes()[name]) == config
    for ranks in (1, 2):
        assert config.accumulation(config.parallel.layout(ranks).batch_ranks) >= 1
    parameters = count_parameters(config.model.architecture(config.data.tokenizer.train))
    said = re.search(r"([\d.]+) ([MB]) parameters", config.recipe.partition("\n")[0])
    assert said or name in SIZES, "the first line says how many parameters, as 1.543 B parameters"
    if said:
        digits = len(said[1].partition(".")[2])
        assert f"{parameters / {'M': 1e6, 'B': 1e9}[said[2]]:.{digits}f}" == said[1]
    assert SIZES.get(name, parameters) == parameters


def test_gpt2_runs_on_a_whole_node():
    """In micro-batches of one sequence, the least that auto may choose."""
    config = load_recipe("gpt2-124m")
    assert [config.accumulation(config.parallel.layout(n).batch_ranks) for n in (1, 2, 4, 8, 32)] == [
        512,
        256,
        128,
        64,
        16,
    ]


def test_keys_of_every_section_have_a_docstring():
    """docs/recipe.md is made of them."""
    missing = []
    for section, field in RunConfig.model_fields.items():
        for name, inner in field.annotation.model_fields.items():
            if not inner.description:
                missing.append(f"{section}.{name}")
    assert missing == []


def test_a_sequence_that_tp_does_not_divide_is_refused_where_the_model_could_be_cut_so():
    error = refused(parallel={"tp": 3})
    assert error.given == "parallel.tp=3 for a model of 40 channels of the MLP"
    assert error.change == "use parallel.tp=1", "no length would help"
    three = {"num_key_value_heads": 3, "intermediate_size": 42}
    error = refused(model=three, parallel={"tp": 3})
    assert error.given == "data.sequence_length=16 with parallel.tp=3"
    assert error.change == "use parallel.tp=1, or data.sequence_length=15 or 18 (the nearest that divide)"
    check_recipe(tree(run={"tokens_per_step": 72}, model=three, data={"sequence_length": 18}, parallel={"tp": 3}))


def test_a_directory_or_a_vocabulary_that_is_not_known_leaves_the_model_out(tmp_path):
    directory = {**dict.fromkeys(TREE["model"]), "from": str(tmp_path)}
    for sections in ({"model": directory}, {"data": {"tokenizer": {"from": str(tmp_path)}}}):
        error = refused(**sections, parallel={"tp": 3})
        assert error.given == "data.sequence_length=16 with parallel.tp=3"
        sizes = "use parallel.tp=1 or 2 or 4"
        assert error.change == f"{sizes}, or data.sequence_length=15 or 18 (the nearest that divide)"


def test_muon_beside_offload_is_refused():
    with pytest.raises(UserError, match=r"optim.kind=muon with parallel.offload=true\n.*the host's cores"):
        check_recipe(tree(optim={"kind": "muon"}, parallel={"offload": True}))
    assert check_recipe(tree(parallel={"offload": True})).parallel.offload
    assert check_recipe(tree(optim={"kind": "muon"})).optim.kind == "muon"
