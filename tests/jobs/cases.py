"""What multi-rank cases share: tiny odd-sized models in Hugging Face format, uneven batches, and a layout trained on them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.jobs.reference import Settings
from windlass.model.config import ModelConfig
from windlass.model.hf import load_weights
from windlass.optim.adamw import AdamW
from windlass.optim.clip import clip_gradients
from windlass.optim.config import OptimConfig
from windlass.parallel.build import build_program
from windlass.parallel.config import ParallelConfig, PrecisionConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.precision import precision_of

VOCABULARY = 157  # not divisible by anything; padded to 256
LENGTH = 13
SEQUENCES = 8  # of a global batch
STEPS = 3
RATES = (1e-3, 2e-3, 5e-4)
OPTIM = OptimConfig(learning_rate=1.0, max_norm=0.3, weight_decay=0.1)  # a norm that is reached in every step
SETTINGS = Settings(RATES, max_norm=0.3)

SIZES = {
    "qwen3": dict(
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    ),
    "llama": dict(
        hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2
    ),
    "gpt2": dict(
        n_embd=36, n_layer=3, n_head=3, n_positions=32, n_inner=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}


@dataclass(frozen=True)
class Layout:
    """A row of the matrix: how many ranks, cut how, over how many micro-batches of one sequence each."""

    world: int
    zero: int
    replicate: int
    shard: int
    micro_batch: int = 2
    recompute: str = "none"
    compile: bool = False
    policy: str = "fp64"


def write_model(directory: Path, family: str, tied: bool) -> Path:
    """A random model of transformers' own making; norms and biases are moved off 1 and 0, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, tie_word_embeddings=tied, **SIZES[family])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


def global_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One (ids, targets) per step. Masks are uneven: whole rows count nothing, others lose a step-dependent prefix."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for step in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0] = -100
        targets[1::3, : 4 + step] = -100
        targets[5, step:] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


def train_layout(directory: str, case: Layout) -> dict:
    """On one of `case.world` ranks: the same three steps through build_program, clip and AdamW."""
    parallel = ParallelConfig(
        zero=case.zero, replicate=case.replicate, shard=case.shard, recompute=case.recompute, compile=case.compile
    )
    precision = precision_of(PrecisionConfig(policy=case.policy))
    architecture = ModelConfig.model_validate({"from": directory}).architecture()
    mesh = make_mesh(parallel.layout(case.world), "cpu")
    program = build_program(
        architecture,
        parallel,
        precision,
        mesh,
        torch.device("cpu"),
        lambda named: load_weights(directory, architecture, named),
    )
    optimizer = AdamW(program.records(), OPTIM)
    losses, norms, evaluations = [], [], []
    per_rank = SEQUENCES // mesh.layout.batch_ranks
    for step, (ids, targets) in enumerate(global_batches()):
        mine = slice(mesh.batch_rank * per_rank, (mesh.batch_rank + 1) * per_rank)
        micro = case.micro_batch
        batches = [{"input_ids": i, "targets": t} for i, t in zip(ids[mine].split(micro), targets[mine].split(micro))]
        optimizer.set_learning_rate(RATES[step])
        count = mesh.sum_over_loss((targets[mine] != -100).sum())
        losses.append(program.run(batches, count).item())
        norms.append(clip_gradients(program.records(), OPTIM.max_norm, mesh.parts).item())
        optimizer.step(torch.tensor(norms[-1]))
        evaluations.append((program.evaluate(batches) / count).item())
    weights = {record.name: full(record.tensor.detach()) for record in program.records()}
    return {"losses": losses, "norms": norms, "evaluations": evaluations, "weights": weights}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a sharded one."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
