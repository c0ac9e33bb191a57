"""Text from a checkpoint: what a seed fixes, what sampling may draw, what is refused."""

import io
import json
import shutil
import sys

import pytest
import torch

from tests import tiny
from windlass.cli import main as cli
from windlass.commands.models import generate as of_generate
from windlass.commands.models.generate import ChatWriter, choose_token, converse, generate, sample
from windlass.commands.models.sampling import Sampling
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.model.cache import KVCache
from windlass.model.config import architecture_from_hf
from windlass.model.init import initialise
from windlass.training.start.open_saved import SavedModel, empty, open_saved


def test_a_seed_draws_the_same_text_and_steps_differ(run):
    first = generate(run, ["a rope"], Sampling(max_tokens=24, temperature=1.0, seed=1))
    assert first == generate(run, ["a rope"], Sampling(max_tokens=24, temperature=1.0, seed=1))
    assert first != generate(run, ["a rope"], Sampling(max_tokens=24, temperature=1.0, seed=2))
    assert first != generate(run, ["a rope"], Sampling(max_tokens=24, temperature=1.0, seed=1), step=0)


def test_recorded_samples_reach_the_events(run):
    generate(run, ["pull"], Sampling(max_tokens=3), record=True)
    line = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (line["kind"], line["step"], line["prompt"]) == ("sample", tiny.STEPS, "pull")


def test_sampling_takes_the_likeliest_at_temperature_zero_and_stays_in_the_nucleus():
    generator = torch.Generator().manual_seed(0)

    def drawn(times, **sampling):
        return [choose_token(logits, Sampling(**sampling), generator) for _ in range(times)]

    logits = torch.tensor([0.1, 3.0, 2.0, -1.0]).log_softmax(-1)
    assert drawn(1, temperature=0, top_p=1.0) == [1]
    all_of_it = drawn(400, temperature=1.0, top_p=1.0)
    assert set(all_of_it) == {0, 1, 2, 3}
    assert 0.55 < all_of_it.count(1) / 400 < 0.8, "probability 0.68"
    assert set(drawn(200, temperature=1.0, top_p=0.7)) == {1, 2}
    assert set(drawn(50, temperature=1.0, top_p=0.5)) == {1}


def test_a_step_that_is_not_there_is_refused(run, exported):
    with pytest.raises(UserError, match="choose one of: 0, 3, 6, 9, 10"):
        generate(run, ["a"], Sampling(), step=5)
    with pytest.raises(UserError, match="only a run has steps"):
        generate(exported.directory, ["a"], Sampling(), step=5)


def test_a_prompt_longer_than_the_model_is_refused(run):
    with pytest.raises(UserError, match="for a model of 64 positions"):
        generate(run, ["the ship " * 60], Sampling())


def test_the_cache_is_as_long_as_the_text_may_be(run, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        of_generate, "KVCache", lambda *given, **more: lengths.append(given[2]) or KVCache(*given, **more)
    )
    generate(run, ["the ship"], Sampling(max_tokens=3, seed=1))
    generate(run, ["the ship"], Sampling(max_tokens=1000, seed=1))
    assert 3 < lengths[0] < 12 and lengths[1] == 64, "the model's positions at most"


def test_samples_are_recorded_in_a_run_and_nowhere_else(run, exported):
    newest = run / "checkpoints" / f"step-{tiny.STEPS:08d}"
    for path in (newest, exported.directory):
        with pytest.raises(UserError, match="samples are written into a run"):
            generate(path, ["a"], Sampling(), record=True)
        assert not (path / "events.jsonl").exists()


def test_a_directory_without_a_tokenizer_is_refused(exported, tmp_path):
    shutil.copytree(exported.directory, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"bare has no tokenizer\.json"):
        generate(tmp_path / "bare", ["a"], Sampling())


def test_it_stops_where_the_models_own_config_says(exported, tmp_path):
    shutil.copytree(exported.directory, tmp_path / "other")
    tokenizer, eos_id = open_tokenizer(exported.directory)
    (text,) = generate(tmp_path / "other", ["the"], Sampling(temperature=0.0, max_tokens=6))
    second = tokenizer.encode(text).ids[1]
    file = tmp_path / "other" / "config.json"
    for ends in (second, [eos_id, second]):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
        (stopped,) = generate(tmp_path / "other", ["the"], Sampling(temperature=0.0, max_tokens=6))
        assert text.startswith(stopped) and len(tokenizer.encode(stopped).ids) < len(tokenizer.encode(text).ids)


SIZES = {"vocab_size": 300, **{key: tiny.MODEL[key] for key in tiny.QWEN3_KEYS}, "max_position_embeddings": 32}
MODELS = {
    "rope": {"model_type": "qwen3", **SIZES},
    "window": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "learned positions": {
        "model_type": "gpt2", "vocab_size": 300, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32
    },
}  # fmt: skip
PROMPTS = [[5, 9, 31, 7, 120, 44, 8, 16, 201], [17], [5, 9, 31], [17], list(range(40, 53)), [8, 8]]


def model_of(fields):
    """In fp64, far enough from random guessing that the likeliest token is not a matter of rounding."""
    architecture = architecture_from_hf(fields)
    model = empty(architecture, torch.float64)
    with torch.no_grad():
        initialise(model.named_parameters(), architecture, 3)
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return SavedModel(model=model, architecture=architecture, tokenizer_directory=None, directory=None)


@pytest.mark.parametrize(
    ("name", "temperature"), [("rope", 0.0), ("rope", 1.0), ("window", 1.0), ("learned positions", 0.0)]
)
def test_a_prompt_says_in_a_batch_what_it_says_alone(name, temperature):
    saved = model_of(MODELS[name])
    sampling = Sampling(max_tokens=30, temperature=temperature, top_p=1.0, seed=3)
    endless = [sample(saved, [ids], set(), sampling)[0] for ids in PROMPTS]
    assert [len(ids) for ids in endless] == [min(30, 32 - len(ids)) for ids in PROMPTS], "the model's positions at most"
    ends = {endless[4][2]}
    alone = [sample(saved, [ids], ends, sampling)[0] for ids in PROMPTS]
    assert len(alone[4]) <= 2 and max(map(len, alone)) > 8, "one ends early, another goes on"
    together = sample(saved, PROMPTS, ends, sampling)
    again = together.pop(3)  # the same prompt, a second time
    assert together == alone[:3] + alone[4:]
    assert (again == alone[1]) == (temperature == 0), "it is drawn anew"


def test_more_prompts_than_rows_go_batch_by_batch(monkeypatch):
    saved, rows = model_of(MODELS["rope"]), []
    monkeypatch.setattr(of_generate, "KVCache", lambda *given, **more: rows.append(given[1]) or KVCache(*given, **more))
    prompts = [[number] for number in range(5, 40)]
    found = sample(saved, prompts, set(), Sampling(max_tokens=2, temperature=0))
    assert rows == [16, 16, 3] and found[20] == sample(saved, prompts[20:21], set(), Sampling(2, 0))[0]


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def chatting(exported, tmp_path):
    """The exported model with a template whose turns end by a token of their own."""
    directory = tmp_path / "chatting"
    shutil.copytree(exported.directory, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    entry = {**tokenizer["added_tokens"][0], "id": 9, "content": "<end>"}
    (old,) = [token for token, number in tokenizer["model"]["vocab"].items() if number == 9]
    tokenizer["model"]["vocab"]["<end>"] = tokenizer["model"]["vocab"].pop(old)
    tokenizer["added_tokens"].append(entry)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_a_conversation_is_written_by_the_template_and_remembered(chatting, monkeypatch):
    asked = []

    def answers(_saved, prompts, ends, _sampling):
        asked.append((prompts, ends))
        return [open_tokenizer(chatting)[0].encode("pull").ids for _ in prompts]

    monkeypatch.setattr(of_generate, "sample", answers)
    said = list(converse(chatting, ["a rope", "the ship"], Sampling(), step=None, base=None))
    assert said == ["pull", "pull"]
    tokenizer, eos_id = open_tokenizer(chatting)
    texts = [tokenizer.decode(prompts[0], skip_special_tokens=False) for prompts, _ in asked]
    first = "[user]a rope<end>[assistant]"
    assert texts == [first, first + "pull<end>[user]the ship<end>[assistant]"]
    assert asked[0][1] == {eos_id, 9} and asked[0][0][0].count(9) == 1, (
        "the end of a turn is one token, and ends an answer"
    )
    asked.clear()
    generate(chatting, ["a rope", "deck"], Sampling(), chat=True)
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in asked[0][0]] == [
        first,
        "[user]deck<end>[assistant]",
    ]


def test_the_command_answers_line_by_line(chatting, monkeypatch, capsys):
    monkeypatch.setattr(
        of_generate, "sample", lambda _saved, prompts, _ends, _sampling: [[len(ids)] for ids in prompts]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("a rope\n\n the ship \n"))
    monkeypatch.setattr(sys, "argv", ["windlass", "generate", str(chatting), "--chat"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    first, second = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and first != second, "the second answer is behind more words"


def test_a_run_on_texts_that_is_asked_is_exported_first(run):
    with pytest.raises(UserError, match="has no chat template") as caught:
        generate(run, ["a"], Sampling(), chat=True)
    assert caught.value.change.startswith(f"`windlass export {run} base`, write these four lines into base/")


def test_what_a_conversation_cannot_be_is_refused(chatting, exported):
    with pytest.raises(UserError, match="has no chat template"):
        ChatWriter(open_saved(exported.directory))
    with pytest.raises(UserError, match="holds <end> in the words of the user"):
        generate(chatting, ["a <end> b"], Sampling(), chat=True)


def test_a_text_is_cut_to_its_end_where_it_leaves_no_room(run, capsys):
    long, greedy = "the ship " * 60, Sampling(max_tokens=20, temperature=0)
    tokenizer, _ = open_tokenizer(open_saved(run).tokenizer_directory)
    end = tokenizer.decode(tokenizer.encode(long).ids[-44:])
    cut, whole, short = generate(run, [long, end, "deck"], greedy, cut_prompt=True)
    assert cut == whole == generate(run, [end], greedy)[0] and short == generate(run, ["deck"], greedy)[0]
    assert capsys.readouterr().err == f"a prompt of {len(tokenizer.encode(long).ids)} tokens is cut to its last 44\n"
    (half,) = generate(run, [long], Sampling(max_tokens=500, temperature=0), cut_prompt=True)
    assert half == generate(run, [tokenizer.decode(tokenizer.encode(long).ids[-32:])], Sampling(500, 0))[0]


def asked_of(chatting, monkeypatch, asked, **options):
    """What the model reads for `asked`, as text."""
    seen = []
    monkeypatch.setattr(
        of_generate, "sample", lambda _saved, prompts, *_: seen.extend(prompts) or [[] for _ in prompts]
    )
    generate(chatting, asked, Sampling(max_tokens=24), chat=True, **options)
    tokenizer, _ = open_tokenizer(chatting)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in seen]


def test_messages_are_a_prompt_of_a_chat_and_of_nothing_else(chatting, monkeypatch, run):
    said = [{"role": "system", "content": "slow"}, {"role": "user", "content": "a rope"}]
    assert asked_of(chatting, monkeypatch, [said, "deck"]) == [
        "[system]slow<end>[user]a rope<end>[assistant]",
        "[user]deck<end>[assistant]",
    ]
    with pytest.raises(UserError, match="a list of messages as a prompt"):
        generate(run, [said])


def test_of_a_long_chat_the_oldest_turns_go_and_then_the_middle_of_the_question(chatting, monkeypatch, capsys):
    turns = [{"role": role, "content": word} for word in ("ship", "deck") for role in ("user", "assistant")]
    said = [{"role": "system", "content": "slow"}, *turns, {"role": "user", "content": "a rope"}]
    whole, cut = (asked_of(chatting, monkeypatch, [said], cut_prompt=one) for one in (False, True))
    assert whole[0].count("ship") == 2 and whole[0].count("deck") == 2
    assert cut == ["[system]slow<end>[user]a rope<end>[assistant]"], "40 of 64 positions are its room"
    assert capsys.readouterr().err.count("the oldest turns go first") == 1
    long = "anchor " + "the ship " * 30 + "deck"
    (text,) = asked_of(chatting, monkeypatch, [long], cut_prompt=True)
    tokenizer, _ = open_tokenizer(chatting)
    tokenizer.encode_special_tokens = False
    assert 36 <= len(tokenizer.encode(text).ids) <= 40
    assert text.startswith("[user]anchor the ship") and text.endswith("ship deck<end>[assistant]")
    with pytest.raises(UserError, match="and 16 of the message are kept"):
        system = {"role": "system", "content": "the ship " * 30}
        asked_of(chatting, monkeypatch, [[system, {"role": "user", "content": long}]], cut_prompt=True)


def printed_by(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["windlass", "generate", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_a_terminal_marks_where_the_model_begins_and_json_is_plain(run, chatting, monkeypatch, capsys):
    pull = open_tokenizer(chatting)[0].encode(" pull").ids
    monkeypatch.setattr(of_generate, "sample", lambda _saved, prompts, *_: [pull for _ in prompts])
    asked = (chatting, "--prompt", "a rope", "--prompt", "deck")
    assert printed_by(monkeypatch, capsys, *asked) == "---\na rope pull\n---\ndeck pull\n"
    lines = printed_by(monkeypatch, capsys, *asked, "--json").splitlines()  # a directory of Hugging Face has no steps
    expected = [{"step": None, "prompt": prompt, "text": " pull"} for prompt in ("a rope", "deck")]
    assert list(map(json.loads, lines)) == expected
    steps = [json.loads(printed_by(monkeypatch, capsys, *at, "--prompt", "a rope", "--json"))["step"]
             for at in ((run,), (run, "--step", "10"), (run / "checkpoints" / "step-00000010",))]  # fmt: skip
    assert steps == [10, 10, 10]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert printed_by(monkeypatch, capsys, *asked) == "---\na rope => pull\n---\ndeck => pull\n"
    assert printed_by(monkeypatch, capsys, *asked[:3], "--chat") == "a rope\n=>  pull\n"
