"""Reports what was derived from the recipe before step 1: a table in the terminal, resolved.yaml, and the first event."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from windlass.config import RunConfig, to_yaml
from windlass.data.stream.mixture_shares import Shares
from windlass.hardware import read_load
from windlass.model.architecture import Architecture, describe_dropout, parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.flops import count_parameters, describe_experts
from windlass.model.kernels import attention_kernel
from windlass.model.open_config import fewer_rows, model_directory
from windlass.objectives.kept_scores import SCORES
from windlass.optim.config import OptimConfig
from windlass.optim.rules import Rules
from windlass.parallel.activations import RecomputePlan
from windlass.parallel.config import MeshLayout
from windlass.parallel.records import Record
from windlass.parallel.stages import cut_stages
from windlass.precision.fp8 import describe_fp8
from windlass.precision.policy import precision_of
from windlass.safe_text import printable, redacted, say
from windlass.training.parts.device_memory import gradient_bytes, local_bytes
from windlass.training.run import Run
from windlass.training.run_directory import model_header
from windlass.training.run_facts import facts_of
from windlass.training.start.parameter_rules import describe_trainable
from windlass.units import counted, format_bytes, format_count

MANY_EPOCHS: Final = 100
"""A run that reads its data more often than this has too many steps; its first lines say so."""


def announce(
    run: Run, source: str, rules: Rules, recompute: RecomputePlan, drift: Sequence[str], own: Mapping[str, str]
) -> None:
    """Prints what was derived from the recipe; writes recipe.yaml (as given, without secrets), resolved.yaml and the first event.
    `drift`: sentences on what changed since the checkpoint, and was accepted; without them nobody could explain a cliff in a
    curve. `own`: names of the parts that a script brought, by what they are."""
    if run.runtime.rank != 0:
        return
    config, layout, architecture = run.config, run.program.mesh.layout, run.architecture
    accumulation = config.accumulation(layout.batch_ranks)
    derived = {
        "parameters": f"{format_count(count_parameters(architecture))} ({count_parameters(architecture):,})",
        **describe_trainable(config, architecture, rules),
        **_describe_ranks(run),
        "layout": describe_layout(config, layout, architecture, accumulation),
        "global batch": f"{config.sequences_per_step} sequences = {config.micro_batch} per micro-batch "
        f"x {counted(accumulation, 'micro-batch')} x {counted(layout.batch_ranks, 'rank')}",
        "length": f"{run.total_steps} steps, {format_count(run.total_steps * config.run.tokens_per_step)} tokens, "
        + describe_length(config, run.total_steps, _num_samples(run), run.prepared.is_whole),
        "learning rate": own.get("schedule") or describe_rate(config.optim, run.total_steps),
        "attention": _describe_attention(run),
        "memory": describe_memory(run.program.records(), run.optimizer.state_tensors().values()),
        **({"allocator": allocator} if (allocator := run.runtime.allocator()) else {}),
        **describe_objective(config, SCORES in run.base_files),
        **describe_order(config, run.prepared.is_whole),
        **_describe_data(run),
        **_describe_matrices(run),
        **({"activations": str(recompute)} if config.parallel.recomputes != "none" else {}),
        **({"dropout": describe_dropout(architecture)} if architecture.dropout else {}),
        **({"experts": describe_sparse(config, architecture)} if architecture.sparse_layers else {}),
        **({"left out": nulls} if (nulls := describe_nulls(config.model, architecture.family)) else {}),
        **({"of the script": ", ".join(f"{kind} {name}" for kind, name in own.items())} if own else {}),
        "starts": source,
    }
    _say(run, derived)
    header = "".join(f"# {name}: {printable(redacted(value))}\n" for name, value in derived.items())
    _keep(config.run.directory / "recipe.yaml", config.recipe)
    _keep(config.run.directory / "resolved.yaml", header + model_header(architecture) + to_yaml(config))
    run.recorder.event(
        "resume" if run.start_step else "start",
        run.start_step,
        derived=derived,
        provenance=_brief(run.provenance),
        baselines=run.baselines(),
        **({"drift": list(drift)} if drift else {}),
        facts=facts_of(run, accumulation).to_event(),
        data={"stream": run.prepared.stream, **run.source.entry()},
    )


def describe_sparse(config: RunConfig, architecture: Architecture) -> str:
    """The experts, and what of their layers is compiled (Block.compile)."""
    is_part = "; of their layers attention alone is compiled" if config.parallel.compiles else ""
    return describe_experts(architecture) + is_part


def describe_memory(records: Sequence[Record], states: Iterable[torch.Tensor]) -> str:
    """What this rank keeps of its parameters from the first step on, by kind; activations and what is gathered are not in it."""
    trained = [record for record in records if record.tensor.requires_grad]
    kinds = {
        "weights": sum(local_bytes(record.tensor) for record in trained),
        "copies for products": sum(local_bytes(copy) for record in trained for copy in record.copies),
        "gradients": sum(gradient_bytes(record.tensor) for record in trained),
        "optimizer states": sum(map(local_bytes, states)),
    }
    held = (one for record in records if not record.tensor.requires_grad for one in (record.tensor, *record.copies))
    frozen = sum(map(local_bytes, held))
    num_trained = max(1, sum(local_bytes(one.tensor) // one.tensor.element_size() for one in trained))
    listed = ", ".join(f"{name} {size / num_trained:.3g}" for name, size in kinds.items() if size)
    total = sum(kinds.values())
    apart = f"{format_bytes(frozen)} of frozen weights, and {format_bytes(total)}" if frozen else format_bytes(total)
    return (
        f"{apart} on rank 0 = {total / num_trained:.3g} bytes per trained parameter: {listed}; "
        "activations and what ranks gather come on top"
    )


def _describe_matrices(run: Run) -> dict[str, str]:
    """What is multiplied in fp8, and the rows of embedding and head."""
    scaling = run.config.precision.fp8_scaling
    eight = {"fp8": describe_fp8(parameter_shapes(run.architecture), scaling)} if scaling else {}
    return {**eight, "vocabulary": describe_vocabulary(run)}


def describe_vocabulary(run: Run) -> str:
    """How many rows the vocabulary has, which of them make it a multiple of 128, and which a base does not have."""
    architecture, model = run.architecture, run.config.model
    size, whole = architecture.vocab_size, architecture.padded_vocab_size
    padded = f"{size}, padded to {whole}" if whole > size else str(size)
    if run.start_step or model.from_ is None:
        return padded
    rows = fewer_rows(model_directory(model), architecture.vocab_size)
    return (
        padded if rows is None else f"{padded}; {architecture.vocab_size - rows} rows are new, the mean of the others"
    )


def _keep(file: Path, text: str) -> None:
    """Replaces `file`, whole. A full disk ends no run: what was there stays, and the checkpoints hold their own."""
    draft = file.with_suffix(".draft")
    try:
        draft.write_text(text, "utf-8")
        draft.replace(file)
    except OSError as error:
        say(f"{file} is not written: {error.strerror}")
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def describe_rate(optim: OptimConfig, steps: int) -> str:
    """How the learning rate goes over a run."""
    last = "" if optim.schedule == "constant" else f" to {optim.learning_rate * optim.floor:.4g}"
    assert optim.warmup_steps != "auto"  # a number since the run's length is known
    share = f" ({optim.warmup_steps / steps:.1%} of the run)" if optim.warmup_steps else ""
    return f"{optim.learning_rate:g}, {optim.schedule}{last}; warm-up over {optim.warmup_steps} steps{share}"


def describe_nulls(model: ModelConfig, family: str) -> str:
    """Keys of the recipe that set nothing; empty where there are none."""
    keys = ", ".join(f"model.{key}: null" for key in model.nulls_left_out(family))
    return keys and f"{keys} ({family} has no such field known here)"


def describe_objective(config: RunConfig, has_kept_scores: bool) -> dict[str, str]:
    """The loss of a preference run, and what it compares with."""
    objective = config.objective
    if objective.kind != "dpo":
        return {}
    line = f"dpo, {objective.preference_loss}, beta {objective.preference_beta:g}"
    if not objective.has_reference:
        return {"objective": f"{line}, without a reference"}
    reference = "scores of the model that the run began with" if has_kept_scores else "the base, without the factors"
    return {"objective": f"{line}; reference: {reference}"}


def _describe_ranks(run: Run) -> dict[str, str]:
    """The number of ranks and their device; on the CPU, where all that runs shares its cores, how many threads each takes."""
    ranks = {"ranks": f"{run.program.mesh.layout.world} on {run.runtime.device_name()}"}
    return ranks | ({"threads": f"{torch.get_num_threads()} per rank"} if run.runtime.device.type == "cpu" else {})


def _say(run: Run, derived: Mapping[str, str]) -> None:
    width = max(map(len, derived))
    for name, value in derived.items():
        say(f"  {name:<{width}}  {value}")
    if run.runtime.device.type == "cpu":
        for word in describe_load(torch.get_num_threads(), read_load(), os.cpu_count()):
            say(f"  {word}")


def describe_load(threads: int, load: float | None, cores: int | None) -> list[str]:
    """One sentence where other programs compute on this host and a rank has several threads, which wait for the slowest."""
    if load is None or cores is None or threads == 1 or load <= cores:
        return []
    change = "OMP_NUM_THREADS=1 before the command is often faster then"
    return [f"this host is busy: {load:.1f} threads of other programs for {cores} cores. {change}"]


def _num_samples(run: Run) -> int:
    return sum(shard.num_samples for shard in run.source.shards)


def describe_layout(config: RunConfig, layout: MeshLayout, architecture: Architecture, num_micro: int) -> str:
    """The axes of a run in one line, with the cut of a pipeline and its idle share: that of gpipe and 1f1b with stages that take
    equal time."""
    parallel = config.parallel
    axes = [f"replicate {layout.replicate}", f"shard {layout.shard}"]
    axes = [f"pp {layout.pp}"] * (layout.pp > 1) + axes + [f"context {layout.context}"] * (layout.context > 1)
    axes += [f"tp {layout.tp}"] * (layout.tp > 1)
    experts = f", experts over {layout.expert} of shard x context" * (layout.expert > 1)
    line = (
        f"{' x '.join(axes)}, zero {parallel.zero_stage}"
        + f", {parallel.context_kind}" * (layout.context > 1)
        + experts
    )
    if layout.pp == 1:
        return line
    stages = cut_stages(architecture, layout.pp, parallel.schedule)
    idle = (layout.pp - 1) / (num_micro + layout.pp - 1)
    word = "idle" if parallel.schedule in ("gpipe", "1f1b") else "1f1b would be idle for"
    return f"{line}; {parallel.schedule}, blocks {stages}; {word} {idle:.1%} of a step"


def describe_length(config: RunConfig, total_steps: int, num_samples: int, is_whole: bool) -> str:
    """How much of the data a run reads, as far as that is known."""
    samples = total_steps * config.samples_per_step
    if is_whole:
        epochs = samples / num_samples
        return f"{epochs:.2f} epochs" + (", in which a model learns its text by heart" if epochs > MANY_EPOCHS else "")
    return f"{samples} samples, of which {num_samples} are prepared so far"


def describe_order(config: RunConfig, is_whole: bool) -> dict[str, str]:
    """How the first epoch is read, where it is not shuffled; or by whom, in lanes."""
    if (lanes := config.data.order.lanes) > 1:
        return {"order": f"{lanes} lanes of shards: a host reads those of its own lanes alone"}
    if config.data.order.first_epoch != "written":
        return {}
    rest = "" if is_whole else "; data is still being prepared: no baselines, and later shards are not linted"
    return {"first epoch": f"in written order, shuffled inside windows of {config.data.shuffle_window} shards{rest}"}


def _describe_attention(run: Run) -> str:
    config = run.config
    return attention_kernel(
        run.architecture,
        rows=config.micro_batch,
        length=config.data.sequence_length,
        dtype=precision_of(config.precision).compute,
        device=run.runtime.device,
        documents=config.data.isolate or config.parallel.computes_slices,
    )


def _describe_data(run: Run) -> dict[str, str]:
    """How documents are packed into sequences, and how often each source of a mixture comes."""
    data, train = run.config.data, run.prepared.sets["train"]
    inside = "documents attend to themselves alone" if data.isolate else "documents see those before them in a sequence"
    full = f", {100 * train.tokens / (train.tokens + train.padding):.2f} % full" if run.prepared.is_whole else ""
    packing = "best-fit" if any(source.format == "chat" for source in data.sources) else data.packing
    found = {"packing": f"a pair is two sequences{full}" if data.is_preference else f"{packing}{full}; {inside}"}
    if (facts := run.source.entry().get("shares")) is not None:
        samples = iter([shard.num_samples for shard in run.source.shards])
        sizes = [sum(islice(samples, number)) for number in train.source_shards]
        lines = Shares.of(facts).lines(data.labels, sizes, run.total_steps * run.config.samples_per_step)
        found |= {f"source {number}": line for number, line in enumerate(lines, 1)}
    return found


def _brief(record: dict[str, Any]) -> dict[str, Any]:
    """Provenance without diff and packages, for the event log; the checkpoints hold all of it."""
    git = {key: record["git"][key] for key in ("commit", "branch")} if record["git"] else None
    return {**{key: record[key] for key in ("argv", "hosts", "platform", "python")}, "git": git}
