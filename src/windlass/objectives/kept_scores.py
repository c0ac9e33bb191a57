"""The scores of the model that a preference run began with: of all its pairs, computed once before step 0, and kept.

They are kept in two places. Beside the prepared data, named by what they are a function of (weights, data, precision), so that
a second run with another `beta` reads them; and in every checkpoint, so that a run that goes on has those it began with, whatever
became of that file: its own weights are no longer the reference. Each set has the fingerprint of its pairs beside its scores, and
scores of other pairs are refused.

A set's scores are an array [samples, 2] in fp64: log q of the chosen and of the rejected answer, 16 bytes per pair.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from windlass.data.batch_fields import Batch
from windlass.errors import UserError
from windlass.objectives.preference import REFERENCE
from windlass.parallel.program import Program

SCORES: Final = "reference/scores.safetensors"
"""The file in a checkpoint."""
Rounds = Iterable[tuple[int, int, Batch]]
"""(the first sample, how many, their batch): this rank's part of a set; as many on every rank."""
PARTS: Final = 10  # of a set, each with a line of progress


@dataclass(frozen=True)
class ReferenceScores:
    began_with: str
    """`identity` of the weights, precision and data that they are of."""
    sets: Mapping[str, np.ndarray]
    pairs: Mapping[str, str]
    """The fingerprint of each set's pairs."""

    def to_bytes(self) -> bytes:
        facts = {"began_with": self.began_with, "pairs": dict(self.pairs), "digest": _digest(self.sets, self.pairs)}
        return save(dict(self.sets), {"scores": json.dumps(facts)})  # one key: safetensors writes several in any order

    @staticmethod
    def parse(data: bytes) -> "ReferenceScores | None":
        """None where `data` is not what `to_bytes` made."""
        try:
            size = int.from_bytes(data[:8], "little")
            facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["scores"])
            sets = load(data)
            scores = ReferenceScores(facts["began_with"], sets, facts["pairs"])
        except (ValueError, KeyError, TypeError, SafetensorError):
            return None
        return scores if facts.get("digest") == _digest(sets, scores.pairs) else None

    def of(self, name: str, samples: int, fingerprint: str) -> np.ndarray:
        """The scores of a set that now has `samples` of this `fingerprint`. Raises UserError."""
        scores_N2 = self.sets.get(name)
        if scores_N2 is not None and len(scores_N2) == samples and self.pairs.get(name) == fingerprint:
            return scores_N2
        held = "none" if scores_N2 is None else f"{len(scores_N2):,}"
        raise UserError(
            f"the set {name} holds {samples:,} pairs, and the run has reference scores of {held}"
            + (" other pairs" if scores_N2 is not None and len(scores_N2) == samples else ""),
            "a pair is compared with its score under the model that the run began with, computed before step 0",
            "give the data that the run began with; or begin another run.directory with run.start_from",
        )


def identity(facts: Mapping[str, Any]) -> str:
    """A hash of everything that scores are a function of."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def score_pairs(name: str, rounds: Rounds, samples: int, program: Program, log: Callable[[str], None]) -> np.ndarray:
    """-> [samples, 2], the same on every rank. Collective."""
    scores_N2: torch.Tensor | None = None
    due = 0
    for first, count, batch in rounds:
        found_P2 = program.score([batch]).double().view(-1, 2)
        if scores_N2 is None:
            scores_N2 = found_P2.new_zeros((samples, 2))
        scores_N2[first : first + count] = found_P2[:count]
        if first >= due:
            log(f"reference scores of {name}: {min(first, samples):,} of {samples:,} pairs")
            due += -(-samples // PARTS)
    assert scores_N2 is not None, "a set has a sample"
    found: np.ndarray = program.mesh.sum_over_batch(scores_N2).cpu().numpy()
    return found


def with_scores(batch: Batch, scores_N2: np.ndarray, samples: np.ndarray) -> Batch:
    """`batch` with the scores of its pairs, which are `samples` of the set; rows behind them (padding) have 0."""
    rows = torch.zeros(len(batch["input_ids"]), dtype=torch.float64)
    rows[: 2 * len(samples)] = torch.from_numpy(scores_N2[samples]).flatten()
    return {**batch, REFERENCE: rows.to(batch["input_ids"].device)}


def _digest(sets: Mapping[str, np.ndarray], pairs: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(json.dumps(dict(pairs), sort_keys=True).encode(), digest_size=16)
    for name in sorted(sets):
        digest.update(name.encode() + np.ascontiguousarray(sets[name], np.float64).tobytes())
    return digest.hexdigest()
