"""A run of one process without torch.distributed, for the tests of files and bytes."""

from pathlib import Path

import torch

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.config import CheckpointConfig


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    """A tensor of two pieces, small ones, a scalar, an empty one. Their values depend on the step, their sizes do
    not.
    """
    generator = torch.Generator().manual_seed(step)
    return {
        "model.big": torch.randn(1100, 1000, generator=generator),
        "model.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
        "model.empty": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.mask": torch.rand(13, generator=generator) > 0.5,
    }


def make_run(run: Path, logged: list[str] | None = None, **settings: object) -> Checkpoints:
    config = CheckpointConfig.model_validate({"async": False, "keep_last": 10, **settings})
    tell = (lambda sentence: None) if logged is None else logged.append
    return Checkpoints(run / "checkpoints", config, run_id="run", rank=0, world=1, group=None, log=tell)


def save_steps(run: Path, *steps: int, metrics: dict[int, float] | None = None, **settings: object) -> Checkpoints:
    checkpoints = make_run(run, **settings)
    for step in steps:
        files: dict[str, bytes | Path] = {"resolved.yaml": b"seed: 1\n", "tokenizer/vocab.txt": b"a b c\n"}
        checkpoints.save(step, make_tensors(step), {"samples": 10 * step}, files, metric=(metrics or {}).get(step))
    checkpoints.wait()
    return checkpoints


def is_state_of(tensors: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors(step).items())


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in make_tensors(0).items()}
