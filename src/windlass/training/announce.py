"""What was derived from the recipe, told before step 1 and written beside the run: a table, resolved.yaml, the first event."""

from typing import Any

from windlass.config import to_yaml
from windlass.model.architecture import describe_dropout
from windlass.model.flops import count_parameters, describe_experts
from windlass.model.kernels import attention_kernel
from windlass.precision.policy import precision_of
from windlass.training.arrival import describe_length, describe_order
from windlass.training.layout import describe_layout
from windlass.training.parameter_rules import describe_trainable, rules_of
from windlass.training.recompute import describe_recompute
from windlass.training.run import Run, model_header
from windlass.units import format_count


def announce(run: Run, source: str) -> None:
    """What was derived, told before step 1, and written: recipe.yaml as given, resolved.yaml, and the first event."""
    if run.runtime.rank != 0:
        return
    config, layout, architecture = run.config, run.program.mesh.layout, run.architecture
    accumulation = config.accumulation(layout.batch_ranks)
    derived = {
        "parameters": f"{format_count(count_parameters(architecture))} ({count_parameters(architecture):,})",
        **describe_trainable(config, architecture, rules_of(config, architecture)),
        "ranks": f"{layout.world} on {run.runtime.device_name()}",
        "layout": describe_layout(config, layout, architecture, accumulation),
        "global batch": f"{config.sequences_per_step} sequences = {config.run.micro_batch} per micro-batch "
        f"x {accumulation} micro-batches x {layout.batch_ranks} ranks",
        "length": f"{run.total_steps} steps, {format_count(run.total_steps * config.run.tokens_per_step)} tokens, "
        + describe_length(config, run.total_steps, _num_samples(run), run.prepared.is_whole),
        "attention": _describe_attention(run),
        **describe_order(config, run.prepared.is_whole),
        **_describe_data(run),
        "vocabulary": f"{architecture.vocab_size}, padded to {architecture.padded_vocab_size}",
        **describe_recompute(config, architecture, run.runtime.device.type),
        **({"dropout": describe_dropout(architecture)} if architecture.dropout else {}),
        **({"experts": describe_experts(architecture)} if architecture.sparse_layers else {}),
        "starts": source,
    }
    width = max(map(len, derived))
    for name, value in derived.items():
        print(f"  {name:<{width}}  {value}", flush=True)
    header = "".join(f"# {name}: {value}\n" for name, value in derived.items())
    (config.run.directory / "recipe.yaml").write_text(config.recipe)
    (config.run.directory / "resolved.yaml").write_text(header + model_header(architecture) + to_yaml(config))
    run.recorder.event(
        "resume" if run.start_step else "start",
        run.start_step,
        derived=derived,
        provenance=_brief(run.provenance),
        baselines=run.baselines(),
        data={"stream": run.prepared.stream, **run.source.entry()},
    )


def _num_samples(run: Run) -> int:
    return sum(shard.num_samples for shard in run.source.shards)


def _describe_attention(run: Run) -> str:
    config = run.config
    return attention_kernel(
        run.architecture,
        rows=config.run.micro_batch,
        length=config.data.sequence_length,
        dtype=precision_of(config.precision).compute,
        device=run.runtime.device,
        documents=config.data.isolate or config.parallel.computes_slices,
    )


def _describe_data(run: Run) -> dict[str, str]:
    """How documents lie in sequences, and what of a mixture comes how often."""
    data, train = run.config.data, run.prepared.sets["train"]
    inside = "documents attend to themselves alone" if data.isolate else "documents see those before them in a sequence"
    full = f", {100 * train.tokens / (train.tokens + train.padding):.2f} % full" if run.prepared.is_whole else ""
    found = {"packing": f"{data.packing}{full}; {inside}"}
    shares = run.prepared.shares(data.weights)
    if shares is not None:
        samples = [shard.num_samples for shard in run.source.shards]
        names = [source.label for source in data.sources]
        lines = shares.told(names, samples, run.total_steps * run.config.sequences_per_step)
        found |= {f"source {number}": line for number, line in enumerate(lines, 1)}
    return found


def _brief(record: dict[str, Any]) -> dict[str, Any]:
    """Provenance without diff and packages, for the event log; the checkpoints hold all of it."""
    git = {key: record["git"][key] for key in ("commit", "branch")} if record["git"] else None
    return {**{key: record[key] for key in ("argv", "hosts", "platform", "python")}, "git": git}
