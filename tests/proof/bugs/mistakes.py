"""Mistakes that trainers in use have made without a word (each was seen in the field), outside of a layout's sums."""

from tests.proof.bugs.bug import Bug

FLOPS, SCHEDULE = "model/flops.py", "optim/schedule.py"

# fmt: off
# ruff: noqa: E501  texts of the source, whole lines of it
MISTAKES = {
    "labels shifted twice": Bug(
        "learned the token after next",
        (("data/stream/collate.py", '"targets": targets_BT}',
          '"targets": np.pad(targets_BT[:, 1:], ((0, 0), (0, 1)), constant_values=NOT_COUNTED)}'),),
        mistake="labels_shifted_twice",
    ),
    "data split twice": Bug(
        "three quarters of the data never read",
        (("data/stream/order.py", "<= self.end\n        parts = [np.empty((0, 2), np.int64)]\n",
          "<= self.end\n        parts, count, start, step = [np.empty((0, 2), np.int64)], 2 * count, 2 * start, 2\n"),
         ("data/stream/order.py", "count - len(part)\n        return np.concatenate(parts)\n",
          "count - len(part)\n        return np.concatenate(parts)[::step]\n")),
        mistake="data_split_twice",
    ),
    "a rate that rises after the end": Bug(
        "undid the training", ((SCHEDULE, "update = min(step + 1, total_steps)", "update = step + 1"),),
        mistake="rate_rises_after_the_end",
    ),
    "a first update at rate zero": Bug(
        "one batch read for nothing", ((SCHEDULE, "update = min(step + 1, total_steps)", "update = min(step, total_steps)"),),
        mistake="first_update_at_rate_zero",
    ),
    "a cache in training": Bug(
        "keys and values of older weights", (("model/cache.py", "        if torch.is_grad_enabled():\n", "        if False:\n"),),
        mistake="cache_in_training",
    ),
    "a device's peak by a part of its name": Bug(
        "MFU 3 to 10 times too high",
        (("hardware.py", "re.fullmatch(device.pattern, name)", "any(part in device.pattern for part in name.split())"),),
        mistake="peak_by_substring",
    ),
    "a mean of micro-batches' means": Bug(
        "few targets weigh as much as many",
        (("parallel/program.py", "else self._forward(batch, factor=factor)",
          'else self._forward(batch, factor=self._factor((batch["targets"] != -100).sum() * len(batches)))'),),
        mistake="mean_of_means",
    ),
    "weights by rank": Bug(
        "a new model for every number of ranks",
        (("model/init.py", '    digest = hashlib.blake2b(f"{key}/{index}"', '    digest = hashlib.blake2b(f"{torch.distributed.get_rank()}/{key}/{index}"'),),
        mistake="weights_by_rank",
    ),
    "an optimizer made before sharding": Bug(
        "the loss stays constant",
        (("parallel/invariants.py", "    if held != used:\n", "    if len(held) != len(used):\n"),),
        mistake="optimizer_before_sharding",
    ),
    "a wrap that matches nothing": Bug(
        "nothing is sharded",
        (("parallel/build.py", "apply_fsdp(part, part.blocks, part.end, mesh, precision, config)", "apply_fsdp(part, [], [], mesh, precision, config)"),),
        mistake="wrap_that_matches_nothing",
    ),
    "a resume from nothing": Bug(
        "trained from scratch, silently",
        (("training/start/drift.py", "    for directory in candidates(path):\n", "    for directory in []:\n"),), mistake="resume_from_nothing",
    ),
    "a rate read as text": Bug(
        "`3e-4` is a string in YAML 1.1", (("recipe.py", "return loader.get_single_data()", "return yaml.safe_load(text)"),),
        mistake="rate_read_as_text",
    ),
    "a batch rounded up": Bug(
        "264 or 384 sequences where 256 were set",
        (("config.py", "        raise_all(batch_errors(*batch, parallel.schedule, parallel.pp, per_sample=self._per_sample))\n"
          "        return self.sequences_per_step // (self.micro_batch * batch_ranks)",
          "        return -(-self.sequences_per_step // (self.micro_batch * batch_ranks))"),),
        mistake="batch_rounded_up",
    ),
    "a tie counted twice": Bug(
        "a model of 1.316 B called 1.5 B",
        ((FLOPS, "return sum(math.prod(shape) for shape in parameter_shapes(arch).values())",
          "return sum(math.prod(s) for s in parameter_shapes(arch).values()) + arch.tied * arch.vocab_size * arch.hidden_size"),),
        mistake="tie_counted_twice",
    ),
    "a head forgotten": Bug(
        "FLOPs 6 % short", ((FLOPS, "    head = arch.vocab_size * arch.hidden_size\n", "    head = 0\n"),), mistake="head_forgotten",
    ),
    "frozen parameters counted": Bug(
        "MFU of work that nobody did", ((FLOPS, "_backward(arch, frozenset(frozen) | ", "_backward(arch, frozenset() | "),),
        mistake="frozen_counted",
    ),
}
