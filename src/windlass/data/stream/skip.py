"""Shards that cannot be read, left out of a run: a few, agreed by all ranks, remembered by its checkpoints.

By default a bad shard ends the run with its name. `data.max_bad_shards` lets a run leave out so many. The order does not
change: a place of the stream whose sample lies in such a shard becomes a row of ids 0 that counts no target. So shapes and the
places of all other samples stay, and a mean is over the targets that are left.

Agreement. A shard may be bad for one rank alone: another host has a good copy in its cache, or has mapped it before. So before a
global batch is used, all ranks of the run, those of one pipeline too, join what they met in it: 8 bytes all-reduced, and the
complaints where there is one. A shard is out from the first place of the global batch in which any rank met it until the run
ends, though it may be readable again, since else the stream would depend on when it was looked at.

The state is one place per shard, `since`. With it the stream is a function of (seed, samples consumed) as before. A global batch
that lies in such shards as a whole is passed over: the samples are consumed, no step is spent on them, and no mean is over
nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from windlass.data.packing import NOT_COUNTED
from windlass.data.shards.index import REPAIR
from windlass.data.shards.mds import Reader
from windlass.errors import BadShard, UserError

Complaint = tuple[str, str]
"""What was found of a shard, and what it should be."""
Agree = Callable[[dict[int, Complaint]], dict[int, Complaint]]
"""Joins what the ranks found. Collective; called by all ranks once per global batch."""


class SkipRule(NamedTuple):
    """What a run may leave out. `limit`: shards; `since`: those that it has left out, and the place from which on."""

    limit: int
    since: Mapping[int, int]
    agree: Agree


class Skips:
    """Reads as `Reader` does, with nothing for what is left out, and says which rows of a global batch those are.

    Two threads use it: one reads ahead (`read`, `found_in`), one takes the batches (`settle`), which alone changes `since`.
    Raises UserError where the run has left out more than it now may.
    """

    def __init__(self, reader: Reader, sequence_length: int, rule: SkipRule):
        self.since = dict(rule.since)
        self._reader, self._limit, self._agree = reader, rule.limit, rule.agree
        self._nothing = np.zeros(sequence_length + 1, np.int32), np.full(sequence_length + 1, NOT_COUNTED, np.int32)
        self._bad: dict[int, Complaint] = {}
        self._news: list[dict[str, Any]] = []
        if len(self.since) > self._limit:
            raise UserError(
                f"data.max_bad_shards={self._limit}, and the checkpoint has left out {len(self.since)} "
                f"({', '.join(map(reader.name, self.since))})",
                "a shard that was left out once stays out, or the stream would be another one",
                f"set data.max_bad_shards to {len(self.since)} or more, or begin another run.directory",
            )

    def name(self, number: int) -> str:
        return self._reader.name(number)

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number`, or ids 0 that are not counted where the shard is out or cannot be read."""
        if number in self.since or number in self._bad:
            return self._nothing
        try:
            ids, labels = self._reader.read(number, row)
        except BadShard as error:
            self._bad[number] = (error.given, error.rule)
            return self._nothing
        if len(ids) != len(self._nothing[0]):
            given = f"sample {row} of {self.name(number)} holds {len(ids)} ids"
            self._bad[number] = (given, f"every sample of this set holds {len(self._nothing[0])}")
            return self._nothing
        return ids, labels

    def found_in(self, shards_N: np.ndarray) -> dict[int, Complaint]:
        """What this rank could not read of these shards, which it has just read."""
        return {number: self._bad[number] for number in np.unique(shards_N).tolist() if number in self._bad}

    def settle(self, start: int, shards_G: np.ndarray, found: dict[int, Complaint]) -> np.ndarray:
        """Of the global batch that begins at `start`, whose samples lie in `shards_G`: which rows are lost, [G] bool, on all
        ranks alike. `found`: what this rank could not read of it. Collective. Raises BadShard, on all ranks, beyond the limit."""
        new = {number: told for number, told in self._agree(found).items() if number not in self.since}
        if new:
            self._check_limit(new)
        for number in sorted(new):
            self.since[number] = start
            self._news.append(self._lost(number, start, new[number]))
        lost_G = np.isin(shards_G, list(self.since))
        if lost_G.all():
            what = f"{len(lost_G)} samples from place {start} on all lie in shards that are left out: passed over"
            self._news.append({"what": what, "passed": {"from_sample": start, "samples": len(lost_G)}})
        return lost_G

    def _check_limit(self, new: dict[int, Complaint]) -> None:
        total, of = len(self.since) + len(new), len(self._reader.shards)
        if total <= self._limit and total < of:
            return
        told = "; ".join(f"{given} ({rule})" for given, rule in new.values())
        raise BadShard(
            f"{total} of {of} shards of {self._reader.source.where} cannot be read; now {told}",
            f"a run leaves out data.max_bad_shards={self._limit} at most, and never all",
            f"{REPAIR}; or set data.max_bad_shards to {total} or more: the run goes on from its last checkpoint",
        )

    def _lost(self, number: int, start: int, complaint: Complaint) -> dict[str, Any]:
        samples, (given, rule) = self._reader.shard_samples[number], complaint
        what = (
            f"{self.name(number)} is left out from sample {start} on, {len(self.since)} of data.max_bad_shards={self._limit}; "
            f"its {samples} samples per epoch count no target: {given}; {rule}"
        )
        return {"what": what, "left_out": {"shard": number, "from_sample": start, "samples": samples}}

    def news(self) -> list[dict[str, Any]]:
        """What was left out or passed over since the last call, as fields of incidents: `what`, and `left_out` (shard,
        from_sample, samples per epoch) or `passed` (from_sample, samples)."""
        news, self._news = self._news, []
        return news


def blank(batch: dict[str, Any], lost_B: np.ndarray) -> None:
    """Takes the samples out of rows that this rank could read and others could not, in place. A row is one document then."""
    if not lost_B.any():
        return
    rows = np.flatnonzero(lost_B)
    batch["input_ids"][rows], batch["targets"][rows] = 0, NOT_COUNTED
    if "documents" in batch:
        batch["documents"][rows] = batch["input_ids"].shape[1]
        batch["documents"][rows, 0] = 0
