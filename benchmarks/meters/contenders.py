"""The trainers that benchmarks/overhead.py counts, all on one recipe: same starting weights, same batches, same update.

The model is our Decoder everywhere, so that only the trainers differ. The update: fused AdamW with two decay groups, clip 1.0,
warm-up and cosine. Batches of 2 x 32 tokens, fp32, one process. So all must end with the same validation loss. The two of FSDP2
train in bf16 on two ranks, with units and casts that are alike.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from meters.counting import STEPS, WARM_UP, Count
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from windlass.config import RunConfig, check_recipe
from windlass.data.batch_fields import Batch
from windlass.data.prepare.prepare import open_prepared
from windlass.data.stream.evaluation_set import evaluation_set
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_order import Opening
from windlass.data.stream.open_stream import open_stream
from windlass.model.init import initialise
from windlass.model.transformer import Decoder

TOTAL_STEPS = WARM_UP + 2 * STEPS + 5
MICRO_BATCH, SEQUENCE_LENGTH, VOCABULARY = 2, 32, 320
PEAK, LR_WARMUP, FLOOR, DECAY = 3e-3, 5, 0.1, 0.1


def recipe(folder: Path, name: str, num_layers: int, log_every: int, ranks: int = 1) -> RunConfig:
    """What windlass trains, on several ranks by FSDP2 in bf16. The others read model, data and seed from it; learning rates they
    are given as constants."""
    tree = {
        "run": {
            "directory": str(folder / name),
            "steps": TOTAL_STEPS,
            "tokens_per_step": MICRO_BATCH * SEQUENCE_LENGTH * ranks,
            "micro_batch": MICRO_BATCH,
        },
        "model": {
            "family": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        "data": {
            "sources": [{"path": str(folder / "corpus")}],
            "tokenizer": {"train": 300},
            "directory": str(folder / "data"),
            "sequence_length": SEQUENCE_LENGTH,
            "validation": 0.1,
        },
        "optim": {"learning_rate": PEAK, "warmup_steps": LR_WARMUP, "floor": FLOOR, "weight_decay": DECAY},
        "report": {"every_steps": log_every},
        "precision": {"policy": "bf16" if ranks > 1 else "fp32"},
    }
    return check_recipe(tree)


def write_corpus(directory: Path) -> None:
    directory.mkdir()
    words = ["wind", "rope", "anchor", "turn", "the", "a", "of", "pull", "ship", "slow", "heavy", "and", "deck"]
    for number in range(80):
        text = " ".join(words[(number * 7 + place * place * (number + 3)) % len(words)] for place in range(200))
        (directory / f"{number:03d}.txt").write_text(f"{number} {text}.\n")


class Rows(torch.utils.data.Dataset[Batch]):
    """The samples of `rank` in the order that windlass trains on them, as the other trainers want them."""

    def __init__(self, config: RunConfig, rank: int = 0, ranks: int = 1):
        prepared = open_prepared(config.data, {})
        cut = BatchCut(MICRO_BATCH, batch_rank=rank, batch_ranks=ranks)
        loader = open_stream(Opening(prepared, config.data, cut, config.run.seed))
        taken = [loader.next()[0] for _ in range(TOTAL_STEPS)]
        self.batches = [{"input_ids": batch["input_ids"], "labels": batch["targets"]} for batch in taken]
        loader.close()

    def __len__(self) -> int:
        return TOTAL_STEPS * MICRO_BATCH

    def __getitem__(self, index: int) -> Batch:
        return {name: rows[index % MICRO_BATCH] for name, rows in self.batches[index // MICRO_BATCH].items()}


class MeanLoss(torch.nn.Module):
    """The decoder as the Trainer wants it: its mean loss under a name. No target is masked in these batches."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.decoder(input_ids, labels) / labels.numel()}


def build(
    config: RunConfig, cut: Callable[[Decoder], None] = lambda _decoder: None
) -> tuple[Decoder, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """What a user of the other trainers writes: model, fused AdamW with its decay groups, schedule. `cut` shards the model."""
    decoder = Decoder(config.model.architecture(VOCABULARY))
    initialise(decoder.named_parameters(), decoder.arch, config.run.seed)
    cut(decoder)
    matrices = [p for p in decoder.parameters() if p.ndim >= 2]
    rest = [p for p in decoder.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def factor(step: int) -> float:
        update = min(step + 1, TOTAL_STEPS)
        progress = (update - LR_WARMUP) / (TOTAL_STEPS - LR_WARMUP)
        cosine = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        return update / LR_WARMUP if update <= LR_WARMUP else cosine

    return decoder, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def bare(config: RunConfig, count: Count, _log_every: int) -> Decoder:
    return bare_loop(config, count, Rows(config).batches)


def bare_with_loader(config: RunConfig, count: Count, _log_every: int) -> Decoder:
    return bare_loop(config, count, torch.utils.data.DataLoader(Rows(config), batch_size=MICRO_BATCH))


def bare_fsdp2(config: RunConfig, count: Count, _log_every: int) -> Decoder:
    """On each of several ranks, as torch's tutorial has it: a unit per block, and one for the rest."""
    dist.init_process_group("gloo")
    return bare_loop(config, count, Rows(config, dist.get_rank(), dist.get_world_size()).batches, shard)


def shard(decoder: Decoder) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in decoder.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(decoder, mp_policy=policy)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no average


def bare_loop(
    config: RunConfig, count: Count, batches: Iterable[Batch], cut: Callable[[Decoder], None] = lambda _decoder: None
) -> Decoder:
    decoder, optimizer, scheduler = build(config, cut)
    parameters = list(decoder.parameters())  # looked up once: the cheapest loop that trains the same
    count.start()
    for batch in batches:
        loss = decoder(batch["input_ids"], batch["labels"]) / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return decoder


def accelerate(config: RunConfig, count: Count, _log_every: int) -> Decoder:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(Rows(config), batch_size=MICRO_BATCH)
    decoder, optimizer, scheduler = build(config)
    model, optimizer, loader, scheduler = accelerator.prepare(decoder, optimizer, loader, scheduler)
    parameters = list(decoder.parameters())
    count.start()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch["input_ids"], batch["labels"]) / batch["labels"].numel()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return decoder


def trainer(config: RunConfig, count: Count, log_every: int) -> Decoder:
    from transformers import Trainer, TrainingArguments

    decoder, optimizer, scheduler = build(config)
    arguments = TrainingArguments(
        output_dir=str(config.run.directory),
        per_device_train_batch_size=MICRO_BATCH,
        max_steps=TOTAL_STEPS,
        max_grad_norm=1.0,
        logging_steps=log_every,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    count.start()
    Trainer(MeanLoss(decoder), arguments, train_dataset=Rows(config), optimizers=(optimizer, scheduler)).train()
    return decoder


def windlass(config: RunConfig, count: Count, _log_every: int) -> None:
    from windlass.training.loop import train

    count.start()
    train(config)


LOOPS: dict[str, Callable[[RunConfig, Count, int], Decoder | None]] = {
    "bare": bare,
    "bare+loader": bare_with_loader,
    "windlass": windlass,
    "accelerate": accelerate,
    "trainer": trainer,
    "bare fsdp2": bare_fsdp2,
    "windlass fsdp2": windlass,
}


def validation_loss(config: RunConfig, decoder: Decoder | None) -> float:
    """After training, in nats per target; windlass's own is read from its events."""
    if decoder is None:
        events = (config.run.directory / "events.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, events) if line["kind"] == "validation"][-1]
    data = evaluation_set(
        open_prepared(config.data, {}), config.data, "validation", BatchCut(MICRO_BATCH), config.evaluate.sequences
    )
    with torch.no_grad():
        return sum(float(decoder(**batch)) for batch in data.batches) / data.num_targets
