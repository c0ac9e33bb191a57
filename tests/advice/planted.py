"""Tiny runs that are slow for one reason each, and one that is not, and what is done with their events."""

import json
from pathlib import Path

import torch

from tests import tiny
from windlass.objectives.pretrain import Pretrain
from windlass.training import loop

QUIET = {"evaluate": {"every_steps": 1000}, "checkpoint": {"every_steps": 1000}, "report": {"every_steps": 10}}
# name of the lever -> (ranks, sections of the recipe)
RUNS = {
    "healthy": (1, {"run": {"micro_batch": 8}}),
    "healthy on two ranks": (2, {"run": {"micro_batch": 8, "tokens_per_step": 1024}, "parallel": {"zero": 0}}),
    "the loader is starved": (1, {"run": {"micro_batch": 8}}),
    "the host reads from the device": (1, {"run": {"micro_batch": 8}}),
    "logging every step": (1, {"run": {"micro_batch": 8}, "report": {"every_steps": 1}}),
    "rows of unequal length": (1, {"run": {"micro_batch": 4, "tokens_per_step": 256}}),
    "no accumulation": (2, {"run": {"micro_batch": 1, "tokens_per_step": 32}, "parallel": {"zero": 0}}),
    "tiny buckets": (
        2,
        {"run": {"micro_batch": 8, "tokens_per_step": 1024}, "parallel": {"zero": 0, "bucket_mib": 0.001}},
    ),
    "tiny steps": (1, {"run": {"micro_batch": 1, "tokens_per_step": 16}}),
    "tiny micro-batches": (1, {"run": {"micro_batch": 1, "tokens_per_step": 128}}),
}


class Reading(Pretrain):
    """Looks at its count before every backward."""

    def weigh(self, batches, program):
        batches, count = super().weigh(batches, program)
        assert count.item() > 0 and float(count) > 0
        return batches, count


class Slow:
    """A source whose batches come late, as it reports: nothing sleeps, so that no figure depends on the machine."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    @property
    def wait_s(self):
        return self._source.wait_s + 0.2

    def next(self):
        return self._source.next()


def train(base: Path, name: str) -> None:
    """On one rank."""
    world, sections = RUNS[name]
    if name == "rows of unequal length":
        sections = {**sections, "data": _rows(base)}
    config = tiny.recipe(base, name.replace(" ", "_"), **{**QUIET, **sections, "run": {"steps": 14, **sections["run"]}})
    own = {}
    if name == "the loader is starved":
        own["source"] = Slow
    if name == "the host reads from the device":
        own["objective"] = Reading()
    assert world == (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    loop.train(config, **own)


def _rows(base: Path) -> dict:
    """Documents of which one fills some 60 % of a row, and two do not fit."""
    corpus = base / "short"
    corpus.mkdir()
    for number in range(60):
        (corpus / f"{number}.txt").write_text(f"{number} wind rope anchor turn pull ship slow heavy deck sail.\n")
    more = {"sources": [{"path": str(corpus)}], "directory": str(base / "rows"), "packing": "best-fit"}
    return {**more, "sequence_length": 64, "validation": 0.1, "tokenizer": {"train": 270}}


def set_times(directory: Path, **fields: float | None) -> None:
    """Writes `fields` over those of every step line: times of a quiet machine."""
    file = directory / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{**line, **fields} if line["kind"] == "step" else line for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
