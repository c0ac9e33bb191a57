"""Scores of all pairs, computed once: which rounds fill which rows, on how many ranks, and what belongs to a batch."""

import numpy as np
import torch

from tests.parallel.tiny import make_program
from windlass.objectives.kept_scores import identity, score_pairs, with_scores
from windlass.objectives.preference import REFERENCE

SAMPLES, T = 7, 4


def batch_of(samples, at_once):
    """Pairs whose ids are their number."""
    ids = torch.zeros(2 * at_once, T, dtype=torch.int64)
    ids[: 2 * len(samples)] = torch.tensor(samples).repeat_interleave(2)[:, None] + 1
    targets = ids.clone()
    targets[1::2, 0] = -100
    targets[2 * len(samples) :] = -100
    return {"input_ids": ids, "targets": targets}


def scored(world, at_once):
    program, lines = make_program(world, shard=world), []
    rank, ranks = program.mesh.batch_rank, program.mesh.layout.batch_ranks
    rounds = []
    for at in range(rank * at_once, -(-SAMPLES // (at_once * ranks)) * at_once * ranks, at_once * ranks):
        samples = list(range(SAMPLES))[at : at + at_once]
        rounds.append((min(at, SAMPLES), len(samples), batch_of(samples, at_once)))
    return score_pairs("train", rounds, SAMPLES, program, lines.append).tolist(), lines


def test_every_rank_has_the_scores_of_all_samples(ranks):
    ((alone, lines),) = ranks.run(1, scored, 1, 2)
    assert lines[0] == "reference scores of train: 0 of 7 pairs" and lines[-1].endswith("6 of 7 pairs")
    assert len({tuple(row) for row in alone}) == SAMPLES and all(value < 0 for row in alone for value in row)
    for found, _ in ranks.run(2, scored, 2, 2):
        np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_a_batch_has_the_scores_of_its_samples_and_padding_none():
    scores = np.arange(14.0).reshape(7, 2)
    batch = with_scores(batch_of([0, 0, 0], 4), scores, np.array([5, 0, 2]))
    assert batch[REFERENCE].tolist() == [10, 11, 0, 1, 4, 5, 0, 0]


def test_the_identity_is_of_values_not_of_their_order():
    assert identity({"a": 1, "b": [2]}) == identity({"b": [2], "a": 1}) != identity({"a": 1, "b": [3]})
