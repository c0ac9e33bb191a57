"""benchmarks/use_of_the_prompt.py: its data, its controls and its scores; and the whole of its generated task, tiny."""

import json
import re
from statistics import mean, stdev

import pytest

from tests.docs.test_techniques import ROOT, beside

script = beside(ROOT / "benchmarks", "use_of_the_prompt")
RESULTS = json.loads(script.RESULTS.read_text())
PAGE = ROOT / "docs" / "howto" / "finetune.md"
PAIRS = [(f"prompt {number}", f"answer {number}") for number in range(7)]


def test_words_are_six_letters_and_differ():
    made = script.words(500, seed=3)
    assert len(set(made)) == 500 and made == script.words(500, seed=3) != script.words(500, seed=4)
    assert all(re.fullmatch("[A-Z]{6}", word) for word in made)


@pytest.mark.parametrize("control", [lambda pairs: script.shuffled(pairs, 5), script.wrong_prompts])
def test_a_control_keeps_prompts_and_answers_and_no_pair(control):
    made = control(PAIRS)
    assert [sorted(side) for side in zip(*made)] == [sorted(side) for side in zip(*PAIRS)]
    assert not set(made) & set(PAIRS)


def test_shuffled_pairs_differ_by_seed_and_wrong_prompts_keep_the_order_of_answers():
    assert script.shuffled(PAIRS, 1) == script.shuffled(PAIRS, 1) != script.shuffled(PAIRS, 2)
    assert script.wrong_prompts(PAIRS)[6] == ("prompt 0", "answer 6")


def test_an_answer_matches_whole():
    assert script.matches(["K", " K\n", "KK", ""], [("", "K")] * 4) == [1, 1, 0, 0]


def test_the_beginning_of_a_summary_ends_with_a_sentence():
    short, long = "It cost 12.5 euros. ", "x" * 390 + "."
    assert script.beginning(short + long) == short.strip()
    assert script.beginning("y" * 500 + ". Rest.") == "y" * 500 + "." and script.beginning("no end") == "no end"


def test_meetings_are_asked_about_as_the_recipes_ask(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"transcript": " Yeah. ", "summary": "They agree. "}) + "\n")
    assert script.read_meetings(tmp_path / "train.jsonl") == [("Summarise this meeting.\n\nYeah.", "They agree.")]


def measured(experiment):
    """Method -> its rows, one per seed."""
    rows = RESULTS[experiment]["rows"]
    return {
        method: [row for row in rows if row["method"] == method]
        for method in dict.fromkeys(row["method"] for row in rows)
    }


def matched(method, rows):
    cells = [
        " / ".join(f"{mean(row[name]):.1%}" for row in rows)
        for name in ("right", "wrong", "shuffled")
        if name in rows[0]
    ]
    return f"| {method} | {' | '.join([*cells, '', ''][:3])} |"


def scored(method, rows):
    """Means over meetings, and the mean difference with its standard error over meetings, each the mean of the seeds."""
    held = {
        name: [mean(seeds) for seeds in zip(*(row[name] for row in rows))]
        for name in ("right", "wrong", "shuffled")
        if name in rows[0]
    }
    cells = [f"{mean(held['right']):.3f}"]
    for name in list(held)[1:]:
        differences = [other - own for own, other in zip(held["right"], held[name])]
        cells += [
            f"{mean(held[name]):.3f}",
            f"{mean(differences):+.3f} ± {stdev(differences) / len(differences) ** 0.5:.3f}",
        ]
    return f"| {method} | {' | '.join([*cells, '', ''][:5])} |"


@pytest.mark.parametrize("experiment, shown", [("copy", matched), ("summaries", scored)])
def test_the_page_shows_what_was_measured(experiment, shown):
    lines = PAGE.read_text("utf-8").splitlines()
    assert [row for row in (shown(*one) for one in measured(experiment).items()) if row not in lines] == []


def test_the_prompt_is_used_and_neither_control_passes():
    """In the committed rows of the generated task, every seed of every method."""
    rows = [row for row in RESULTS["copy"]["rows"] if row["method"] != "base"]
    assert {row["method"] for row in rows} == {"full", "lora"}
    assert min(mean(row["right"]) for row in rows) > 0.9
    assert max(mean(row[name]) for row in rows for name in ("wrong", "shuffled")) < 0.2


@pytest.mark.long
def test_the_generated_task_is_learned_and_neither_control_is(tmp_path):
    base, full, lora = script.copy(tmp_path, seeds=(0,), count=3_000)
    assert (base["method"], full["method"], lora["method"]) == ("base", "full", "lora")
    for row in (full, lora):
        assert [len(row[name]) for name in ("right", "wrong", "shuffled")] == [256] * 3
        assert mean(row["right"]) > 0.9 and max(mean(row["wrong"]), mean(row["shuffled"])) < 0.2


@pytest.mark.long
def test_every_held_out_meeting_is_scored(tmp_path):
    for name, rows in (("train", range(200)), ("validation", range(200, 203))):
        talks = [{"transcript": f"Yeah. {row} " * 200, "summary": f"They agree on {row}."} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (tmp_path / "english.txt").write_text("\n".join(f"They say yeah, and agree on {row}." for row in range(4_000)))
    (folder := tmp_path / "runs").mkdir()
    size = script.SUMMARIES._replace(
        hidden_size=64, layers=1, vocabulary=300, sequence_length=128, base_steps=4, steps=2
    )
    rows = list(script.summaries(folder, tmp_path / "english.txt", tmp_path, size, seeds=(0,)))
    assert [row["method"] for row in rows] == ["base", "full", "lora", "nf4"]
    for row in rows[1:]:
        assert [len(row[name]) for name in ("right", "wrong", "shuffled")] == [3] * 3
        assert row["right"] != row["wrong"] and row["right"] != row["shuffled"]
        assert all(0 < nats < 10 for name in ("right", "wrong", "shuffled") for nats in row[name])
