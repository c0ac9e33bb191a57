"""The trainers beside which benchmarks/throughput.py runs windlass, each as its users run it.

    python benchmarks/meters/rivals.py trainer fp32 0    # NAME POLICY COMPILED, on one rank or under torchrun's variables

transformers' Trainer, and a loop through Accelerate, train transformers' Qwen3 (SDPA, no cache, fused AdamW, autocast for bf16).
LitGPT's model trains by the calls of its own `pretrain` (Fabric; bf16-true or 32-true, as its recipes have it; its chunked
loss); on CPUs it has no FSDP, so several ranks are DDP. It is imported here alone, and runs in an environment of its own
(scripts/litgpt_environment.sh). The last line printed is this rank's tokens per second, of steps UNCOUNTED + 1 to STEPS.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

STEPS, UNCOUNTED, MICRO_BATCH, LENGTH, VOCABULARY = 30, 10, 4, 256, 4096  # a third of the steps is not counted
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
PEAK_RATE, WARM_UP, DECAY = 3e-4, 5, 0.1


def rival_model() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, use_cache=False, attn_implementation="sdpa")
    return Qwen3ForCausalLM(config)


def rows_of_ids(length: int = LENGTH) -> Any:
    import torch

    ids = torch.randint(0, VOCABULARY, (MICRO_BATCH * STEPS * 2, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def end_of_steps(loader: Iterable[Any], step: Callable[[Any, int], None]) -> list[float]:
    """When each of STEPS calls of `step` ended; it is called with a batch, and its number from 1 on."""
    ends: list[float] = []
    while True:
        for batch in loader:
            step(batch, len(ends) + 1)
            ends.append(time.perf_counter())
            if len(ends) == STEPS:
                return ends


def rate_of(ends: list[float]) -> float:
    """Tokens per second of one rank, from the time at which each step ended."""
    return MICRO_BATCH * LENGTH * (STEPS - UNCOUNTED) / (ends[-1] - ends[UNCOUNTED - 1])


def trainer(policy: str, compiled: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_more: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=STEPS,
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=PEAK_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=WARM_UP,
            weight_decay=DECAY,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=policy == "bf16",
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(rival_model(), arguments, train_dataset=rows_of_ids(), callbacks=[Clock()]).train()
    return rate_of(ends)


def accelerate(policy: str, compiled: bool) -> float:
    import torch
    from accelerate import Accelerator
    from transformers import get_cosine_schedule_with_warmup

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if policy == "bf16" else "no")
    model = rival_model()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, weight_decay=DECAY, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM_UP, STEPS)
    loader = torch.utils.data.DataLoader(rows_of_ids(), batch_size=MICRO_BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if compiled:
        model = torch.compile(model)

    def step(batch: Any, _number: int) -> None:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return rate_of(end_of_steps(loader, step))


def litgpt(policy: str, compiled: bool) -> float:
    import lightning
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        precision="bf16-true" if policy == "bf16" else "32-true",
    )
    fabric.launch()
    fabric.seed_everything(0)
    config = Config(
        block_size=LENGTH,
        n_layer=SHAPE["num_hidden_layers"],
        n_embd=SHAPE["hidden_size"],
        padded_vocab_size=VOCABULARY,
        vocab_size=VOCABULARY,
        n_head=SHAPE["num_attention_heads"],
        n_query_groups=SHAPE["num_key_value_heads"],
        head_size=SHAPE["head_dim"],
        intermediate_size=SHAPE["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_qk=True,
    )
    with fabric.init_module():
        model: Any = GPT(config)
    model.transformer.wte.weight = model.lm_head.weight
    if compiled:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, weight_decay=DECAY)  # fused on CUDA alone, as there
    optimizer = fabric.setup_optimizers(optimizer)
    ids = torch.stack([row["input_ids"] for row in rows_of_ids(LENGTH + 1)])  # it cuts inputs and targets
    of_ids: Any = torch.utils.data.DataLoader
    loader = fabric.setup_dataloaders(of_ids(ids, batch_size=MICRO_BATCH))

    def step(batch: Any, number: int) -> None:
        progress = max(0, number - WARM_UP) / (STEPS - WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(number / WARM_UP, (1 + math.cos(math.pi * progress)) / 2)
        fabric.backward(chunked_cross_entropy(model(batch[:, :-1].contiguous()), batch[:, 1:].contiguous()))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return rate_of(end_of_steps(loader, step))


if __name__ == "__main__":
    name, policy, compiled = sys.argv[1:]
    print({"trainer": trainer, "accelerate": accelerate, "litgpt": litgpt}[name](policy, compiled == "1"))
