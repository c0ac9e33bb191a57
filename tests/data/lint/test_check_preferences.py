"""Faults of pairs, planted one at a time: each is found under its own name with its place, and clean pairs have none."""

from dataclasses import replace

import numpy as np
import pytest

from tests.data.planted import Planted, text
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.lint import BEFORE_TRAINING, FULL, lint
from windlass.data.shards.mds import Writer
from windlass.data.tokenize.flags import CHOSEN_END, flagged, labelled
from windlass.data.tokenize.preferences import pack_pairs

LENGTH = 64
PAIRS = {"sequence_length": LENGTH, "sources": [{"path": "here", "format": "preference"}], "validation": 0.1}


def a_pair(number):
    """(prompt, chosen, rejected) like no other, of plain words."""
    return text(number, 3), text(1000 + number, 4), text(2000 + number, 2)


@pytest.fixture
def planted(small, tmp_path):
    return Planted(small, tmp_path / "data")


def prepared(planted, pairs, edit=None):
    """A preparation of these pairs; `edit(ids, labels)` changes training samples, [N, 2, T+1]."""
    like = planted.prepared([text(0)], settings=PAIRS)
    sets = {"train": pairs, "validation": [a_pair(100 + number) for number in range(5)]}
    for name, given in sets.items():
        stream = []
        for prompt, *answers in given:
            rows = []
            for answer in answers:
                ids = np.array([*planted.ids(prompt)[:-1], *planted.ids(answer)], np.int32)
                rows.append(flagged(ids, np.arange(len(ids)) >= len(planted.ids(prompt)) - 1, planted.eos))
            rows[0][-1] |= CHOSEN_END
            stream += rows
        ids, labels = labelled(*next(pack_pairs([np.concatenate(stream)], planted.eos, LENGTH)))
        if edit is not None and name == "train":
            edit(ids.reshape(-1, 2, LENGTH + 1), labels.reshape(-1, 2, LENGTH + 1))
        directory = planted.directory / "pairs" / name
        writer = Writer(directory, 2 * (LENGTH + 1), 8192)
        writer.write(ids, labels)
        writer.close()
        like.sets[name] = like.sets["train"].__class__(
            **{**vars(like.sets[name]), "documents": len(given), "samples": len(ids), "tokens": 2 * len(ids) * LENGTH}
        )
    tokenizer = planted.directory / "tokenizer"
    (planted.directory / "pairs" / "tokenizer").symlink_to(tokenizer)
    return replace(like, directory=planted.directory / "pairs")


@pytest.mark.parametrize("limits", [FULL, BEFORE_TRAINING])
def test_clean_pairs_have_no_findings(planted, limits):
    assert lint(prepared(planted, [a_pair(number) for number in range(30)]), limits).findings == []


def plant(planted, fault):
    pairs = [a_pair(number) for number in range(30)]
    prompt, chosen, rejected = pairs[7]
    match fault:
        case "the same answer twice":
            pairs[7] = (prompt, chosen, chosen)
        case "a pair twice":
            pairs = [*pairs, *pairs[:2], (prompt, chosen, rejected)]
        case "a pair the other way round":
            pairs.append((prompt, rejected, chosen))
        case "a pair of validation in train":
            pairs += [a_pair(100), a_pair(101)]
        case "answers of different prompts":
            return prepared(planted, pairs, lambda ids, labels: ids.__setitem__((7, 0, 2), planted.ids("keel")[0]))
        case "an answer that is not learned":
            return prepared(planted, pairs, lambda ids, labels: labels.__setitem__((7, 1), NOT_COUNTED))
        case "a prompt that is learned":
            return prepared(planted, pairs, lambda ids, labels: labels.__setitem__((7, 1, 3), ids[7, 1, 3]))
        case "an id beyond the vocabulary":
            return prepared(planted, pairs, lambda ids, labels: ids.__setitem__((7, 0, 2), planted.vocab_size))
    return prepared(planted, pairs)


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ("the same answer twice", {"pair-of-equals"}),
        ("a pair twice", {"duplicate-documents"}),
        ("a pair the other way round", {"pair-contradicted"}),
        ("a pair of validation in train", {"validation-in-train"}),
        ("answers of different prompts", {"pair-of-two-prompts"}),
        ("an answer that is not learned", {"mask-empty"}),
        ("a prompt that is learned", {"pair-of-two-prompts"}),
        ("an id beyond the vocabulary", {"ids-out-of-vocabulary", "pair-of-two-prompts"}),
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(planted, fault, codes):
    findings = lint(plant(planted, fault)).findings
    assert {finding.code for finding in findings} == codes, findings


def test_a_finding_says_where(planted):
    (finding,) = lint(plant(planted, "a pair the other way round")).findings
    assert finding.line == (
        "warning pair-contradicted: what is chosen here is rejected in shard.00001.mds, sample 0, against the same answer "
        "(train: shard.00004.mds, sample 2)"
    )
