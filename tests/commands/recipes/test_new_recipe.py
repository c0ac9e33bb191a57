"""`windlass init` and `windlass import`: recipes that load and run, and no file half-written or overwritten."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest
import yaml

from tests.commands.command_line import run_command
from windlass.commands.recipes import row_lengths
from windlass.commands.recipes.first_rows import shape_of_file
from windlass.commands.recipes.new_recipe import import_file, init
from windlass.config import load_recipe
from windlass.data.held_out import HeldOutConfig
from windlass.errors import UserError

FILES = Path(__file__).parent / "foreign"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(folder, number):
    draw, words = random.Random(3), ["wind", "rope", "anchor", "turn", "pull", "ship", "slow", "heavy", "deck", "sail"]
    folder.mkdir(exist_ok=True)
    for one in range(number):
        (folder / f"{one}.txt").write_text(" ".join(draw.choices(words, k=2500)))


@pytest.mark.parametrize("number", [30, 1], ids=["texts", "one text"])
def test_a_recipe_of_init_trains(here, number, monkeypatch, capsys):
    write_texts(here / "texts", number)
    data = "texts" if number > 1 else "texts/0.txt"
    code, done = run_command(["init", "--data", data, "--steps", "2"], monkeypatch, capsys)
    assert code == 0 and done.out.strip() == "recipe.yaml is written. Next: windlass train recipe.yaml"
    assert 18 <= len((here / "recipe.yaml").read_text().splitlines()) <= 30
    code, done = run_command(["train", "recipe.yaml"], monkeypatch, capsys)
    assert code == 0, done.err
    assert "finished at step 2 of 2" in done.out


ROWS = {
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "pretrain": {"text": "a"},
}


@pytest.mark.parametrize("kind", ROWS)
def test_the_first_row_says_what_is_learned(here, kind):
    (here / "rows.jsonl").write_text(json.dumps(ROWS[kind]))
    init(here / "r.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 50, None, None)
    config = load_recipe(here / "r.yaml")
    assert config.objective.kind == kind and config.model.from_ == "Qwen/Qwen3-4B" and config.run.steps == 50
    assert config.adapter.kind == ("none" if kind == "pretrain" else "lora")
    assert config.data.sources[0].format == {"sft": "chat", "dpo": "preference", "pretrain": "text"}[kind]
    assert config.data.isolate == (kind == "sft"), "chats that share a sequence do not see each other"


BASE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind", "adapter", "rate"),
    [
        (BASE, "sft", "none", 1e-3),
        (BASE | {"vocab_size": 775_000}, "sft", "none", 1e-3),  # 99,987,840 parameters
        (BASE | {"vocab_size": 775_200}, "sft", "lora", 2e-4),  # 100,013,440
        (BASE, "dpo", "lora", 5e-6),
        (BASE, "pretrain", "none", 1e-5),
        (BASE | {"model_type": "unknown"}, "sft", "lora", 2e-4),
        ([], "sft", "lora", 2e-4),
        (None, "sft", "lora", 2e-4),
    ],
)
def test_a_small_base_learns_conversations_with_all_its_parameters(here, config, kind, adapter, rate):
    """With LoRA a base of a million parameters learned nothing in the 31 steps of its recipe."""
    (here / "base").mkdir()
    if config is not None:
        (here / "base/config.json").write_text(json.dumps(config))
    (here / "rows.jsonl").write_text(json.dumps(ROWS[kind]))
    init(here / "r.yaml", "rows.jsonl", "base", None, None, None)
    recipe = load_recipe(here / "r.yaml")
    assert (recipe.adapter.kind, recipe.optim.learning_rate) == (adapter, rate)
    assert ("a base of under 100 M learns little through LoRA" in (here / "r.yaml").read_text()) == (rate == 1e-3)
    epochs = recipe.run.epochs if kind == "sft" else 1
    assert epochs == (12 if rate == 1e-3 else 3 if kind == "sft" else 1), (
        "few rows teach a small base little in three epochs"
    )


@pytest.mark.parametrize(
    ("row", "rows"),
    [
        ({"question": "a", "system": "s"}, {"prompt": "question", "system": "system"}),
        ({"instruction": "a", "input": ""}, "alpaca"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"prompt": "a", "question": "a"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_pairs_of_other_names_are_read_where_they_are(here, row, rows):
    (here / "rows.jsonl").write_text(json.dumps({**row, "chosen": "b" * 600, "rejected": "c"}))
    init(here / "r.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 50, None, None)
    config = load_recipe(here / "r.yaml")
    (source,) = config.data.sources
    assert config.objective.kind == "dpo"
    assert (source.rows.model_dump(exclude_unset=True) if isinstance(rows, dict) else source.rows) == rows
    longer = {**row, "chosen": "b" * 600, "rejected": "c", "notes" if rows is None else next(iter(row)): "a" * 9000}
    assert (
        row_lengths.choose_length(here / "rows.jsonl", shape_of_file(here / "rows.jsonl", None), "some/model").length
        == 256
    )
    (here / "rows.jsonl").write_text(json.dumps(longer))
    chosen = row_lengths.choose_length(here / "rows.jsonl", shape_of_file(here / "rows.jsonl", None), "some/model")
    assert chosen.length == (256 if rows is None else 4096), "what is asked counts, and nothing that is not read"


def test_a_kind_that_is_given_outranks_the_rows(here):
    rows = ROWS["sft"] | ROWS["pretrain"]
    (here / "rows.jsonl").write_text(json.dumps(rows))
    for kind in ("sft", "pretrain"):
        init(here / f"{kind}.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 50, kind, None)
        assert load_recipe(here / f"{kind}.yaml").objective.kind == kind


@pytest.mark.parametrize(
    ("name", "content", "kind", "given", "change"),
    [
        (
            "r.jsonl",
            json.dumps(ROWS["pretrain"]),
            "sft",
            "nothing in r.jsonl can be learned: r.jsonl:1 has the keys text",
            "format: text",
        ),
        ("r.jsonl", json.dumps({"a": "a", "b": "b"}), None, "r.jsonl:1 has no key `text`", "set `text` of the source"),
        (
            "r.csv",
            "a,b\nc,d\n",
            None,
            "r.csv has no column `text`",
            "set `text` of the source to one of its columns: a, b",
        ),
        ("r.txt", b"caf\xe9 bar", None, "nothing in r.txt can be learned: r.txt is not UTF-8", "iconv"),
        ("r.txt", bytes(100), None, "r.txt is a binary file", "convert it to UTF-8"),
    ],
)
def test_data_of_which_nothing_can_be_learned_make_no_recipe(here, name, content, kind, given, change):
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        init(here / "new.yaml", name, "Qwen/Qwen3-4B", 5, kind, None)
    assert given in caught.value.given and change in caught.value.change and not (here / "new.yaml").exists()


SHARED = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "input": "", "output": "a"}


@pytest.mark.parametrize(
    ("name", "row", "settings"),
    [
        ("r.jsonl", SHARED, {"format": "chat", "rows": "sharegpt"}),
        ("r.jsonl", ALPACA | {"text": "q a"}, {"format": "chat", "rows": "alpaca"}),
        ("r.json", ALPACA, {"format": "chat", "rows": "alpaca"}),
        ("r.jsonl.gz", ALPACA, {"format": "chat", "rows": "alpaca"}),
        ("r.jsonl", {"body": "a", "id": 3}, {"text": "body"}),
        *(
            ("r.jsonl", {one: "q", two: "a"}, {"format": "chat", "rows": {"prompt": one, "completion": two}})
            for one, two in (("question", "answer"), ("prompt", "response"), ("problem", "solution"))
        ),
    ],
)
def test_rows_of_other_names_are_known(here, name, row, settings):
    rows = [row | {"number": one} for one in range(3)]
    text = json.dumps(rows, indent=1) if name == "r.json" else "\n".join(map(json.dumps, rows))
    (here / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    for source in (name, name.replace("r.", "*.", 1)):
        init(here / f"{source[0]}.yaml", source, "Qwen/Qwen3-4B", 5, None, None)
        (written,) = yaml.safe_load((here / f"{source[0]}.yaml").read_text())["data"]["sources"]
        written.pop("too_long", None)
        assert written == {"path": source} | settings


@pytest.mark.parametrize("distinct", [1, 2, 3, 15])
def test_few_rows_that_differ_have_a_validation_set(here, distinct, monkeypatch, capsys):
    words = "a rope, an anchor and a slow turn of the windlass; then the deck, and a heavy sail in the wind. " * 4
    rows = [{"id": one, "text": f"{one % distinct}: {words}"} for one in range(60)]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    init(here / "r.yaml", "rows.jsonl", "small", 1, None, None)
    code, done = run_command(["prepare", "r.yaml"], monkeypatch, capsys)
    assert code == 0, done.err
    (held,) = re.findall(r"^validation: (\d+) documents, [\d,]+ tokens", done.out, re.M)
    assert 1 <= int(held) <= 60


@pytest.mark.parametrize(("distinct", "held_out"), [(1, "none"), (2, HeldOutConfig(bytes=316)), (16, 0.5)])
def test_conversations_are_held_out_whole_where_they_differ(here, distinct, held_out):
    answer = {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [{"role": "user", "content": f"q{one % distinct:02}"}, answer], "id": one % 10}
        for one in range(64)
    ]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    init(here / "r.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 5, "sft", None)
    assert load_recipe(here / "r.yaml").data.validation == held_out


def test_what_is_not_given_is_asked(here):
    write_texts(here / "texts", 2)
    asked, given = [], iter(["texts", "small", "7"])

    def ask(question, default):
        asked.append((question.partition(":")[0], default))
        return next(given)

    init(here / "r.yaml", None, None, None, None, ask)
    assert asked == [("Data", ""), ("Model", "small"), ("Optimizer steps", "1000")]
    assert load_recipe(here / "r.yaml").run.steps == 7
    (here / "rows.jsonl").write_text(json.dumps(ROWS["sft"]))
    given = iter(["rows.jsonl", "Qwen/Qwen3-4B", "2"])
    init(here / "s.yaml", None, None, None, None, ask)
    assert asked[-1] == ("Epochs", "3") and load_recipe(here / "s.yaml").run.epochs == 2


def test_an_answer_that_is_refused_is_asked_for_again_at_once(here, capsys):
    """A mistyped path was refused after the second answer, and all answers were lost."""
    write_texts(here / "texts", 2)
    asked, given = [], iter(["text", "texts", "smal", "small", "many", "7"])

    def ask(question, default):
        asked.append(question.partition(":")[0])
        return next(given)

    init(here / "r.yaml", None, None, None, None, ask)
    assert asked == ["Data", "Data", "Model", "Model", "Optimizer steps", "Optimizer steps"]
    assert load_recipe(here / "r.yaml").run.steps == 7
    printed = capsys.readouterr().err.splitlines()
    assert printed[0::3] == ["no data at text", "--model smal", "'many' steps"]
    assert printed[2] == "  change: did you mean `texts`? correct the path"


def test_what_is_given_is_not_asked_for_again(here):
    with pytest.raises(UserError, match="no data at nowhere"):
        init(here / "r.yaml", "nowhere", None, None, None, lambda _question, _default: pytest.fail("asked"))


@pytest.mark.parametrize("pattern", ["folder/*/rows.jsonl", "*/a/rows.jsonl", "folder/?/*.jsonl"])
def test_the_first_file_of_a_glob_says_what_its_rows_are(here, pattern):
    (here / "folder" / "a").mkdir(parents=True)
    (here / "folder" / "a" / "rows.jsonl").write_text(json.dumps(ROWS["sft"]))
    init(here / "r.yaml", pattern, "Qwen/Qwen3-4B", 50, None, None)
    assert load_recipe(here / "r.yaml").objective.kind == "sft"


@pytest.mark.parametrize(
    ("name", "content", "given"),
    [
        ("a.txt", b"", "nothing in a.txt"),
        ("a.txt", b"x", "nothing in *.nothing"),
        ("a.txt", b"x", "nothing in empty"),
        ("a.json", b"[]", "a.json has no row that can be read"),
        ("a.jsonl", b"[1]\n", "a.jsonl has no row that can be read"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "a.jsonl.gz has no row that can be read"),
    ],
)
def test_data_that_hold_nothing_give_no_recipe(here, name, content, given):
    (here / name).write_bytes(content)
    (here / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        init(here / "r.yaml", given.removeprefix("nothing in ").split(" has ")[0], "small", 5, None, None)
    assert caught.value.given == given and not (here / "r.yaml").exists()


def test_an_array_may_begin_after_an_empty_line(here):
    (here / "rows.json").write_text("\n \n[" + json.dumps(ROWS["sft"]) + "]")
    init(here / "r.yaml", "rows.json", "Qwen/Qwen3-4B", 50, None, None)
    assert load_recipe(here / "r.yaml").objective.kind == "sft"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": None}, "no --data, and no terminal to ask on"),
        ({"data": "nowhere.jsonl"}, "no data at nowhere.jsonl"),
        ({"data": "./org/name"}, "no data at ./org/name"),
        ({"kind": "rl"}, "--kind rl"),
        ({"model": "smal"}, "--model smal"),
        ({"model": "./text"}, "--model ./text"),
        ({"model": "../nowhere"}, "--model ../nowhere"),
        ({"model": "/nowhere/model"}, "--model /nowhere/model"),
        ({"model": "texts/0.tx"}, "--model texts/0.tx: the folder texts has no 0.tx"),
        ({"model": "runs/bas"}, "--model runs/bas: the folder runs has no bas"),
        ({"kind": "sft"}, "--model small with conversations"),
        ({"kind": "dpo"}, "--model small with pairs"),
        ({"steps": "ten"}, "'ten' steps"),
        ({"data": ""}, "no data"),
        ({"data": "./text"}, "no data at ./text"),
        ({"out": "texts"}, "texts is there already"),
    ],
)
def test_refusals_of_init_write_nothing(here, given, words):
    write_texts(here / "texts", 2)
    (here / "runs/base").mkdir(parents=True)
    before = sorted(here.rglob("*"))
    given = {"out": "r.yaml", "data": "texts", "model": "small", "steps": 5, "kind": None} | given
    with pytest.raises(UserError) as caught:
        init(Path(given["out"]), *(given[key] for key in ("data", "model", "steps", "kind")), None)
    assert caught.value.given == words and sorted(here.rglob("*")) == before
    near = {
        "smal": "did you mean `small`? ",
        "./text": "did you mean `texts`? ",
        "texts/0.tx": "for a hub name, run init where no folder is called texts; ",  # a file is no model
        "runs/bas": "did you mean `runs/base`? for a hub name, run init where no folder is called runs; ",
    }.get(given["model"] if given["data"] == "texts" else given["data"], "")
    assert caught.value.change.startswith(near)


def test_the_command_line_imports(here, monkeypatch, capsys):
    code, done = run_command(
        ["import", str(FILES / "axolotl-qlora.yaml"), "-o", "recipe.yaml", "--ranks", "2"], monkeypatch, capsys
    )
    assert code == 0, done.err
    assert load_recipe(here / "recipe.yaml").run.tokens_per_step == 2 * 4 * 2 * 2048
    assert "lora_r: 32 -> adapter.kind=lora adapter.rank=32" in done.err
    assert "not mapped: optimizer paged_adamw_8bit: states are fp32 or bf16" in done.err
    assert "recipe.yaml is written: " in done.out and ", 4 not mapped. Next: look at data.sources" in done.out
    code, done = run_command(["import", str(FILES / "torchtune-full.yaml")], monkeypatch, capsys)
    assert yaml.safe_load(done.out)["run"]["steps"] == 100, "to standard output"


def test_a_description_of_datasets_is_read_where_it_is(here):
    (here / "data").mkdir()
    (here / "data/dataset_info.json").write_text(json.dumps({"dpo_en_demo": {"file_name": "p.jsonl", "ranking": True}}))
    _, found = import_file(FILES / "llama-factory-full-dpo.yaml", None, None, 1)
    assert found.tree["data"]["sources"][0]["path"] == "data/p.jsonl"
    (here / "data/dataset_info.json").write_text("{")
    _, found = import_file(FILES / "llama-factory-full-dpo.yaml", None, None, 1)
    assert found.tree["data"]["sources"][0]["path"] == "data/dpo_en_demo.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        (
            "base_model: a/b\nsequence_len: 1\ndatasets: [{path: x.jsonl, type: completion}]\n",
            "does not load: data.sequence_length",
        ),
    ],
)
def test_a_file_that_gives_no_recipe_writes_none(here, text, words):
    (here / "given.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        import_file(Path("given.yaml"), here / "out.yaml", None, 1)
    assert words in caught.value.given and not (here / "out.yaml").exists()


def test_an_import_of_no_file_names_the_file_and_the_tools_and_writes_none(here, monkeypatch, capsys):
    (here / "axolotl.yaml").write_text("base_model: a/b\n")
    (here / "folder").mkdir()
    for name, given, change in (
        ("axolot.yaml", "no file at axolot.yaml", "did you mean `axolotl.yaml`? give the path of that file"),
        ("demo", "no file at demo", "give the path of that file"),
        ("folder", "folder is a directory", "give the path of that file"),
    ):
        code, done = run_command(["import", name, "-o", "out.yaml"], monkeypatch, capsys)
        assert code == 2 and done.err.splitlines()[0] == f"windlass: {given}" and change in done.err
        assert "axolotl, LLaMA-Factory or torchtune" in done.err and not (here / "out.yaml").exists()


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (5, 1), (6, 2), (9, 2), (1000, 200)])
def test_a_new_recipe_evaluates_and_saves_five_times_or_fewer(here, steps, every):
    """Of 6 to 9 steps it did so after each."""
    (here / "rows.jsonl").write_text(json.dumps(ROWS["pretrain"]))
    init(here / "new.yaml", "rows.jsonl", "Qwen/Qwen3-4B", steps, "pretrain", None)
    recipe = load_recipe(here / "new.yaml")
    assert recipe.evaluate.every_steps == recipe.checkpoint.every_steps == every


def test_an_import_overwrites_nothing(here):
    (here / "out.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"out\.yaml is there already"):
        import_file(FILES / "torchtune-full.yaml", here / "out.yaml", None, 1)
    assert (here / "out.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("out", "given", "change"),
    [
        ("nodir/a.yaml", "-o nodir/a.yaml: nodir does not exist", "make it (mkdir -p nodir), or give another name"),
        ("no dir/b/a.yaml", "-o no dir/b/a.yaml: no dir/b does not exist", "make it (mkdir -p 'no dir/b'), or"),
        ("a.txt/a.yaml", "-o a.txt/a.yaml: a.txt is not a directory", "give another name: -o FILE"),
    ],
)
def test_a_recipe_goes_into_a_directory_that_exists(here, monkeypatch, capsys, out, given, change):
    """A traceback otherwise, of a file that nobody named."""
    (here / "a.txt").write_text("text")
    before = sorted(here.rglob("*"))
    for words in (["init", "--data", "a.txt"], ["import", str(FILES / "axolotl-qlora.yaml")]):
        code, done = run_command([*words, "-o", out], monkeypatch, capsys)
        assert code == 2 and f"windlass: {given}\n" in done.err and change in done.err and not done.out
    assert sorted(here.rglob("*")) == before


def test_a_directory_of_another_user_takes_no_recipe(here, monkeypatch):
    (here / "a.txt").write_text("text")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"-o .*r\.yaml: .* cannot be written by this user"):
        init(here / "r.yaml", "a.txt", "small", 5, None, None)


def test_rows_that_could_not_be_learned_are_named_at_once(here):
    good = [
        {"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}]} for n in range(20)
    ]
    bad = [
        {"messages": good[0]["messages"][:1]},
        {"messages": [*good[0]["messages"][:1], {"role": "assistant", "content": " "}]},
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*good[:3], *bad, *good[3:]]))
    _, (*_, said) = init(here / "r.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 50, None, None)
    assert said.startswith("of the first 22 rows 2 rows are bad: rows.jsonl:4 holds no message of the role assistant (")
    assert said.endswith(
        "leave the row out, or fix its roles. `bad_rows: {at_most: 2}` of the source leaves bad rows out"
    )
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    assert init(here / "s.yaml", "rows.jsonl", "Qwen/Qwen3-4B", 50, None, None)[1] == []
    (here / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": None}) + "\n")
    _, (*_, said) = init(here / "t.yaml", "rows.jsonl", None, 50, "pretrain", None)
    assert said.startswith("of the first 2 rows 1 row is bad: rows.jsonl")


@pytest.mark.parametrize(("given", "steps"), [("1k", 1000), ("7", 7), ("1.5k", 1500)])
def test_steps_of_init_are_a_count(here, monkeypatch, capsys, given, steps):
    (here / "a.txt").write_text("wind and rope " * 400)
    assert run_command(["init", "--data", "a.txt", "--steps", given, "-o", "r.yaml"], monkeypatch, capsys)[0] == 0
    assert load_recipe(here / "r.yaml").run.steps == steps


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "many", "0.0001k"])
def test_steps_that_are_no_count_are_refused_in_our_words(here, monkeypatch, capsys, given):
    (here / "a.txt").write_text("wind and rope " * 400)
    code, done = run_command(["init", "--data", "a.txt", "--steps", given, "-o", "r.yaml"], monkeypatch, capsys)
    assert code == 2 and f"windlass: '{given}' steps" in done.err and not (here / "r.yaml").exists()


def test_a_run_is_exported_before_another_begins_with_it(here):
    (here / "runs/mine/checkpoints").mkdir(parents=True)
    (here / "rows.jsonl").write_text(json.dumps(ROWS["sft"]))
    with pytest.raises(UserError, match="--model runs/mine") as caught:
        init(here / "r.yaml", "rows.jsonl", "runs/mine", None, None, None)
    assert caught.value.change == "windlass export runs/mine, then --model runs/mine/export"
