"""The text of a new recipe: about twenty lines, or thirty for a new model, with what each is for beside it. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from windlass.commands.recipes.first_rows import Kind
from windlass.commands.recipes.row_lengths import USUAL, Chosen

SMALL: Final = "small"
"""The model of `init` that is trained from nothing: a million parameters, for a first run on any machine."""
FROM_NOTHING: Final = (
    ("model:", "a million parameters, from nothing; {from: NAME} goes on with the weights of another"),
    ("  family: qwen3", ""),
    ("  hidden_size: 128", ""),
    ("  intermediate_size: 384", ""),
    ("  num_hidden_layers: 4", ""),
    ("  num_attention_heads: 4", ""),
    ("  num_key_value_heads: 2", ""),
    ("  head_dim: 32", ""),
    ("  max_position_embeddings: 1024", ""),
    ("  tie_word_embeddings: true", ""),
    ("  initializer_range: 0.088", "1 / sqrt(hidden_size)"),
)
SMALL_BASE: Final = 100_000_000
"""Parameters; a local base of fewer learns conversations with all of them. Measured 2026-11-28 on two CPU cores: `init`'s small
model as base, 288 conversations, 31 steps: validation loss 5.39 with LoRA at 2e-4, 1.89 with all parameters at 2e-4, 1.33 at
1e-3. The bound itself is not measured."""
PART_OF_EPOCH: Final = 8
"""Where rows are few, a step takes at most one epoch divided by this."""
PART_OF_SMALL: Final = 64
"""The divisor where a small base trains all parameters. Measured 2026-11-28 on two CPU cores: `init`'s small model as base, 504
conversations, three epochs, seeds 0 and 1: validation loss 1.59 and 1.55 with an eighth of an epoch a step (26 steps), 1.22 and
1.18 with a sixteenth, 1.11 and 1.05 with a 32nd, 1.06 and 1.00 with a 64th (201 steps), in the same seconds."""
EPOCHS_OF_LITTLE: Final = "12"
"""Epochs over few rows, for a small base. Measured on that day: a base of a million parameters and 500 short questions answers 64
of them right after 3 epochs, 325 after 6, 498 after 12; trained longer itself, 144 after 3 and 494 after 12."""
ALL_PARAMETERS: Final = "of all parameters: a base of under 100 M learns little through LoRA"
LORA: Final = (("adapter: {kind: lora, rank: 16}", "left out: all parameters; base: nf4 is QLoRA"),)
COMMENTS: Final = {
    "pretrain": "every token of every text is learned",
    "sft": "of conversations the assistant's answers are learned",
    "dpo": "of two answers to a prompt the chosen one becomes more likely",
}


def trains_all(num_parameters: int | None) -> bool:
    """Whether a base of as many parameters learns conversations with all of them. None: not known."""
    return num_parameters is not None and num_parameters < SMALL_BASE


def epochs_of_chats(num_parameters: int | None, chosen: Chosen) -> str:
    """How often conversations are read, if the user says nothing."""
    return EPOCHS_OF_LITTLE if trains_all(num_parameters) and chosen.sequences is not None else "3"


def written(
    out: Path,
    rows: dict[str, Any],
    model: str,
    duration: tuple[str, int],
    kind: Kind,
    chosen: Chosen,
    validation: tuple[str, str],
    num_parameters: int | None = None,
) -> str:
    """`out`: its file, by which directories are named. `rows`: the source, with what its rows are. `duration`: steps or epochs,
    and how many. `validation`: its value, and a comment. `num_parameters`: the base's, where that is known."""
    is_small, name, length = model == SMALL, out.stem, chosen.length
    sequences = 8 if is_small else max(2, min(16, _power(16 * USUAL // length)))
    is_full = kind == "sft" and trains_all(num_parameters)
    if chosen.sequences is not None:  # of few rows
        share = PART_OF_SMALL if is_full else PART_OF_EPOCH
        sequences = max(2 if kind == "dpo" else 1, min(sequences, _power(chosen.sequences // share)))
    micro = min(sequences, 4 if is_small else 2 if length <= USUAL or kind == "dpo" else 1)
    rate = "4e-3" if is_small else "1e-3" if is_full else {"pretrain": "1e-5", "sft": "2e-4", "dpo": "5e-6"}[kind]
    unit, amount = duration
    steps = amount if unit == "steps" else amount * (chosen.sequences or 500 * sequences) // sequences
    every = max(1, -(-steps // 5))  # five times, or fewer
    lines = [
        (f"# {COMMENTS[kind]}. Every key: windlass keys", ""),
        ("run:", ""),
        (f"  directory: runs/{name}", "everything that the run writes; the same command resumes there"),
        (f"  {unit}: {amount}", ""),
        (f"  tokens_per_step: {length * sequences}", f"over all ranks: {sequences} sequences"),
        (f"  micro_batch: {micro}", "sequences per rank at once; lower it where memory runs out"),
        *(FROM_NOTHING if is_small else [(f"model: {{from: {json.dumps(model)}}}", "")]),
        ("data:", ""),
        (f"  sources: [{flow(rows)}]", ""),
        ("  tokenizer: {train: 2048}" if is_small else f"  tokenizer: {{from: {json.dumps(model)}}}", ""),
        (f"  directory: runs/{name}-data", "prepared shards"),
        (f"  sequence_length: {length}", chosen.meaning.partition(";")[0]),
        *([("  isolate: true", "a chat does not see those before it in its sequence")] if kind == "sft" else []),
        (f"  validation: {validation[0]}", validation[1]),
        (f"objective: {{kind: {kind}}}", ""),
        *(LORA if kind != "pretrain" and not is_full else []),
        ("parallel: {zero: auto}", "of several processes: the least of ZeRO's stages that fits"),
        ("precision: {policy: auto}", "bf16 where the device has it"),
        (f"optim: {{learning_rate: {rate}}}", ALL_PARAMETERS if is_full else ""),
        (f"checkpoint: {{every_steps: {every}, keep_last: 2}}", ""),
        (f"evaluate: {{every_steps: {every}}}", ""),
    ]
    return "".join(f"{line:40}  # {comment}".rstrip() + "\n" if comment else f"{line}\n" for line, comment in lines)


def _power(number: int) -> int:
    """The largest power of two up to `number`; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def flow(source: Mapping[str, Any]) -> str:
    """A mapping of YAML on one line."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in source.items()) + "}"
