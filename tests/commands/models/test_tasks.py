"""Tasks of the evaluation harness: our answers to its three requests, and a task from local files where it is installed."""

import json

import pytest
import torch

from windlass.commands.models.generate import generate, sample
from windlass.commands.models.sampling import Sampling
from windlass.commands.models.tasks import Scorer, run_tasks
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.training.start.open_saved import open_saved


@pytest.fixture(scope="module")
def scorer(run):
    return Scorer(open_saved(run))


@pytest.fixture(scope="module")
def scored(run):
    """ids, how many of them count -> (nats of the last ones, is greedy), by one forward of these ids alone."""
    saved = open_saved(run)

    @torch.no_grad()
    def scored(ids, count):
        logits, places = saved.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1), range(len(ids) - count, len(ids))
        return (
            sum(logits[at - 1, ids[at]].item() for at in places),
            all(int(logits[at - 1].argmax()) == ids[at] for at in places),
        )

    return scored


def test_a_continuation_is_scored_behind_its_context(run, scorer, scored):
    tokenizer, eos_id = open_tokenizer(run / "checkpoints" / "step-00000010" / "tokenizer")
    pairs = [("the ship ", "and the rope"), ("a", " deck"), ("", "pull"), ("the", " heavy wind and the anchor turn")]
    pairs += [("the ship", tokenizer.decode([number])) for number in range(60, 300, 2)]
    expected = []
    for context, continuation in pairs:
        before = tokenizer.encode(context.rstrip()).ids or [eos_id]
        whole = (
            tokenizer.encode(context + continuation).ids if context else [eos_id, *tokenizer.encode(continuation).ids]
        )
        expected.append(scored(whole, len(whole) - len(before)))
    found = scorer.loglikelihood(pairs)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    ids = tokenizer.encode("the ship").ids
    (next_id,) = sample(open_saved(run), [ids], set(), Sampling(1, 0.0))[0]
    said = scorer._score([(ids, [next_id]), (ids, [next_id - 1])])
    assert [is_greedy for _, is_greedy in said] == [True, False]


def test_what_is_longer_than_the_model_loses_the_begin_of_its_context(run, scorer, scored):
    tokenizer, eos_id = open_tokenizer(run / "checkpoints" / "step-00000010" / "tokenizer")
    text = "the ship and the anchor " * 20
    ids = tokenizer.encode(text + "rope").ids
    ((nats, _),) = scorer.loglikelihood([(text, "rope")])
    count = len(ids) - len(tokenizer.encode(text.rstrip()).ids)
    assert nats == pytest.approx(scored(ids[-65:], count)[0], abs=1e-4)
    ids = tokenizer.encode(text).ids
    assert 64 < len(ids) < 128 and scorer.loglikelihood_rolling(["", text])[0] == 0
    rolled = scored([eos_id, *ids[:64]], 64)[0] + scored(ids[-65:], len(ids) - 64)[0]
    assert scorer.loglikelihood_rolling([text]) == [pytest.approx(rolled, abs=1e-3)], "every token once"
    with pytest.raises(UserError, match="for a model of 64 positions"):
        scorer.loglikelihood([("a", text)])


def test_a_text_ends_before_the_first_of_its_ends(run, scorer):
    (text,) = generate(run, ["the ship"], Sampling(12, 0.0))
    end = text[len(text) // 2 :][:3]
    said = scorer.generate_until(
        [
            ("the ship", {"max_gen_toks": 12}),
            ("the ship", {"max_gen_toks": 12, "until": ["never", end]}),
            ("the ship " * 60, {"max_gen_toks": 60, "until": end}),
        ]
    )
    assert said[:2] == [text, text[: text.find(end)]] and end not in said[2]
    with pytest.raises(UserError, match="have num_beams"):
        scorer.generate_until([("a", {"num_beams": 4})])


def write_tasks(directory):
    rows = [{"question": f"the {word}", "choices": [" and", " qq"], "answer": 0} for word in ("ship", "rope", "wind")]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {directory}/rows.jsonl}}}}\ntest_split: test\n"
    (directory / "choice.yaml").write_text(
        f"task: choice\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}]\n"
    )
    (directory / "text.yaml").write_text(
        f"task: text\n{shared}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{question}}}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )


def test_tasks_run_from_local_files(run, scorer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path)
    lines = run_tasks(run, tmp_path)
    questions = ["the ship", "the rope", "the wind"]
    right = [scorer.loglikelihood([(text, " and"), (text, " qq")]) for text in questions]
    accuracy = sum(one[0][0] > one[1][0] for one in right) / 3
    (acc,) = [line for line in lines if line.startswith("choice: acc ")]
    assert acc.startswith(f"choice: acc {accuracy:.4f}")
    bits = -sum(scorer.loglikelihood_rolling(questions)) / sum(map(len, questions)) / 0.6931471805599453
    assert [line for line in lines if line.startswith("text: ")] == [f"text: bits_per_byte {bits:.4f}"]
    assert [line.split(":")[0] for line in run_tasks(run, tmp_path / "text.yaml", limit=1)] == ["text"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it holds no task"):
        run_tasks(run, tmp_path / "empty")


def test_without_the_harness_it_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError) as caught:
        run_tasks(run, tmp_path)
    assert caught.value.given == "--tasks, and lm-eval is not installed"
    assert caught.value.change == "pip install 'windlass-lm[eval]'"
