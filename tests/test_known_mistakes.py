"""Mistakes that trainers in use have made without a word (each was seen in the field), planted here one at a time and found.

    mistake                          what it did                               prevented in, tested further by
    labels_shifted_twice             learned the token after next              data/loader, tests/data/test_loader
    decay_lost_to_sharding           0 of 20 parameters decayed                optim/groups, tests/optim/test_adamw
    clip_per_rank                    shards of one tensor scaled differently   optim/clip, tests/optim/test_clip
    rate_rises_after_the_end         undid the training                        optim/schedule, tests/optim/test_schedule
    first_update_at_rate_zero        one batch read for nothing                optim/schedule, tests/optim/test_schedule
    cache_in_training                keys and values of older weights          model/cache, tests/model/test_cache
    peak_by_substring                MFU 3 to 10 times too high                hardware, tests/test_hardware
    mean_of_means                    few targets weigh as much as many         parallel/program, test_same_loss_mutations
    data_split_twice                 three quarters of the data never read     data/loader, tests/data/test_loader
    weights_by_rank                  a new model for every number of ranks     model/init, tests/model/test_init
    optimizer_before_sharding        the loss stays constant                   parallel/census, tests/parallel/test_census
    wrap_that_matches_nothing        nothing is sharded                        parallel/census, tests/parallel/test_census
    resume_from_nothing              trained from scratch, silently            training/drift, tests/training/test_restore
    rate_read_as_text                `3e-4` is a string in YAML 1.1            recipe, tests/test_recipe
    batch_rounded_up                 264 or 384 sequences where 256 were set   config, tests/test_config
    tie_counted_twice                a model of 1.316 B called 1.5 B           model/flops, tests/model/test_presets
    head_forgotten                   FLOPs 6 % short                           model/flops, tests/model/test_flops
    frozen_counted                   MFU of work that nobody did               model/flops, tests/model/test_flops

Every mistake is a function (ranks, directory, planted) that asserts what is right; planted, the assertion must fail.
"""

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests import tiny as recipes
from tests.data.streams import open_bare
from tests.parallel import tiny
from windlass import hardware, recipe
from windlass.config import RunConfig
from windlass.data.shards.mds import Reader, Writer
from windlass.data.stream import collate, order
from windlass.errors import BadLayout, UserError
from windlass.model import flops, init
from windlass.model.cache import KVCache
from windlass.model.config import ModelConfig
from windlass.model.transformer import Decoder
from windlass.optim import adamw, clip, groups, schedule
from windlass.optim.config import OptimConfig
from windlass.optim.rules import NO_RULES
from windlass.parallel import build
from windlass.parallel import invariants as census
from windlass.parallel.program import ShardedProgram
from windlass.parallel.records import Record
from windlass.proof.pool import RankFailed
from windlass.training import drift


def plant(planted, target, name, mistake, **how):
    """`mistake` in place of target.name, where it is to be planted."""
    return mock.patch.object(target, name, mistake, **how) if planted else contextlib.nullcontext()


def small_decoder():
    torch.manual_seed(2)
    return Decoder(ModelConfig.model_validate(tiny.MODEL).architecture())


# ---- data


def labels_shifted_twice(_ranks, directory, planted):
    ids = np.random.default_rng(1).integers(0, 150, (6, 10), np.int32)
    writer = Writer(directory / "train", 10, 4096)
    writer.write(ids, ids)
    writer.close()
    make = collate.collate

    def again(*args):
        found = make(*args)
        return {**found, "targets": functional.pad(found["targets"][:, 1:], (0, 1), value=-100)}

    settings = {"sequence_length": 9, "micro_batch": 6, "accumulation": 1, "batch_rank": 0, "batch_ranks": 1}
    with plant(planted, collate, "collate", again):
        reading = open_bare(directory / "train", **settings, seed=0, shuffle_window=1)
        (batch,) = reading.next()
        reading.close()
    decoder = small_decoder()
    with torch.no_grad():
        mean = decoder(**batch) / (batch["targets"] != -100).sum()
        stored_BT = torch.from_numpy(ids).long()
        logits_BTV = decoder(stored_BT)[:, :-1]  # what stands after position t is the target of position t, once
        expected = functional.cross_entropy(logits_BTV.flatten(0, 1), stored_BT[:, 1:].flatten())
    assert abs(mean - expected) < 1e-5


def data_split_twice(_ranks, directory, planted):
    ids = np.repeat(np.arange(24, dtype=np.int32)[:, None], 5, 1)
    writer = Writer(directory / "train", 5, 200)
    writer.write(ids, ids)
    writer.close()
    assert len(Reader(directory / "train").shard_samples) > 1
    take = order.Order.take

    def every_other(self, start, count):
        return take(self, 2 * start, 2 * count)[::2]

    seen = []
    with plant(planted, order.Order, "take", every_other):
        for rank in range(2):
            settings = {"sequence_length": 4, "micro_batch": 2, "accumulation": 3, "batch_rank": rank, "batch_ranks": 2}
            reading = open_bare(directory / "train", **settings, seed=0, shuffle_window=2)
            seen += [row for _ in range(2) for batch in reading.next() for row in batch["input_ids"][:, 0].tolist()]
            reading.close()
    assert sorted(seen) == list(range(24)), "an epoch is every sample once, over all ranks"


# ---- optimizer


def _flat_decay(record, config, rules):
    local = record.tensor.to_local() if isinstance(record.tensor, DTensor) else record.tensor
    return groups_decay_of(Record(record.name, record.tensor, torch.Size([local.numel()])), config, rules)


groups_decay_of = groups.decay_of


def _decayed(planted):
    program = tiny.make_program(2, 3, 1, 2)
    with plant(planted, groups, "decay_of", _flat_decay):
        made = groups.parameter_groups(program.records(), OptimConfig(), NO_RULES)
    return sum(len(group["params"]) for group in made if group["weight_decay"] > 0)


def decay_lost_to_sharding(ranks, _directory, planted):
    assert ranks.run(2, _decayed, planted) == [1 + 7 * tiny.BLOCKS] * 2


def _norms(planted):
    program = tiny.make_program(2, 3, 1, 2, "fp64")
    program.run([tiny.batch(program.mesh.batch_rank)], torch.tensor(16.0))
    whole = [tiny.full(record.tensor.grad) for record in program.records()]
    total = torch.nn.utils.get_total_norm

    def local(gradients, *rest, **named):
        return total([getattr(g, "_local_tensor", g) for g in gradients], *rest, **named)

    with plant(planted, torch.nn.utils, "get_total_norm", local):
        norm = clip.clip_gradients(program.records(), 0.01, program.mesh.parts)
    clipped = [tiny.full(record.tensor.grad) for record in program.records()]
    return norm.item(), total(whole).item(), total(clipped).item()


def clip_per_rank(ranks, _directory, planted):
    for norm, true, after in ranks.run(2, _norms, planted):
        assert norm == pytest.approx(true, rel=1e-12) and after == pytest.approx(0.01, rel=1e-3)


def rate_rises_after_the_end(_ranks, _directory, planted):
    config = OptimConfig(learning_rate=1.0, warmup_steps=2)
    with plant(planted, schedule, "min", lambda step, end: step, create=True):
        rates = [schedule.learning_rate(step, 10, config) for step in range(20)]
    assert max(rates[9:]) == pytest.approx(0.1), "clamped to the floor"


def first_update_at_rate_zero(_ranks, _directory, planted):
    rate = schedule.learning_rate
    with plant(planted, schedule, "learning_rate", lambda step, *rest: rate(step - 1, *rest)):
        assert schedule.learning_rate(0, 10, OptimConfig(learning_rate=1.0, warmup_steps=2)) == 0.5


# ---- model


def cache_in_training(_ranks, _directory, planted):
    decoder, refused = small_decoder(), False
    cache = KVCache(decoder.arch, 1, 8, dtype=torch.float32)
    with plant(planted, KVCache, "check", lambda *args: None):
        try:
            decoder(tiny.batch()["input_ids"], cache=cache).sum().backward()
        except UserError:
            refused = True
    assert refused


def _initial(planted):
    draw = init.draw_block
    rank = torch.distributed.get_rank()
    with plant(planted, init, "draw_block", lambda key, *rest: draw(f"{rank}/{key}", *rest)):
        program = tiny.make_program(2, 3, 1, 2)
    return {record.name: tiny.full(record.tensor) for record in program.records()}


def _initial_alone():
    return {record.name: tiny.full(record.tensor) for record in tiny.make_program(1).records()}


def weights_by_rank(ranks, _directory, planted):
    (alone,) = ranks.run(1, _initial_alone)
    for weights in ranks.run(2, _initial, planted):
        assert all(torch.equal(weights[name], value) for name, value in alone.items())


def tie_counted_twice(_ranks, _directory, planted):
    shapes = flops.parameter_shapes
    with plant(planted, flops, "parameter_shapes", lambda arch: shapes(dataclasses.replace(arch, tied=False))):
        for preset, billions in (("gpt2-1.3b", 1.316), ("gpt2-26b", 25.87), ("gpt2-65b", 64.86)):
            count = flops.count_parameters(ModelConfig(preset=preset).architecture())
            assert count == pytest.approx(billions * 1e9, rel=5e-4), preset


def head_forgotten(_ranks, _directory, planted):
    arch = ModelConfig(preset="smollm3-3b").architecture()
    multiplied = flops.count_multiplied
    with plant(planted, flops, "count_multiplied", lambda a: multiplied(a) - a.vocab_size * a.hidden_size):
        found = flops.flops_per_token(arch, 8192)
    assert (found.palm / 1e9, found.causal / 1e9) == (pytest.approx(25.70, abs=5e-3), pytest.approx(22.07, abs=5e-3))


def frozen_counted(_ranks, _directory, planted):
    arch = ModelConfig.model_validate(tiny.MODEL).architecture()
    frozen = [name for name in flops.parameter_shapes(arch) if name != "model.norm.weight"]
    backward = flops._backward
    with plant(planted, flops, "_backward", lambda a, names: backward(a, frozenset())):
        found = flops.flops_per_token(arch, 8, frozen)
    head = arch.vocab_size * arch.hidden_size
    forward = 2 * flops.count_multiplied(arch) + 4 * arch.num_layers * arch.num_heads * arch.head_dim * 8
    assert found.palm == forward + 2 * head, "forward, and through the head to the last norm"


# ---- layout


def _uneven_mean(planted):
    program = tiny.make_program(1, 3, 1, 1, "fp64")
    batches = [tiny.batch(0), tiny.batch(1)]
    batches[1]["targets"] = torch.where(torch.arange(8) < 7, -100, batches[1]["targets"])
    forward = ShardedProgram._forward

    def own_mean(self, batch):
        return forward(self, batch) / (batch["targets"] != -100).sum() * 9 / 2

    nats = sum(program.evaluate([batch]).item() for batch in batches)
    with plant(planted, ShardedProgram, "_forward", own_mean):
        return program.run(batches, torch.tensor(9.0)).item(), nats / 9


def mean_of_means(ranks, _directory, planted):
    ((loss, expected),) = ranks.run(1, _uneven_mean, planted)
    assert loss == pytest.approx(expected, rel=1e-12), "8 targets in one micro-batch, 1 in the other"


def _stale(planted):
    program = tiny.make_program(1)
    before = [Record(r.name, torch.nn.Parameter(r.tensor.detach().clone()), r.logical_shape) for r in program.records()]
    optimizer = adamw.AdamW(before, OptimConfig())

    def by_number(param_groups, records):
        if sum(len(group["params"]) for group in param_groups) != len(records):
            raise BadLayout("another number of parameters", "", "")

    with plant(planted, census, "check_optimizer", by_number):
        try:
            census.check_optimizer(optimizer.param_groups, program.records())
        except BadLayout:
            return True
    return False


def optimizer_before_sharding(ranks, _directory, planted):
    assert ranks.run(1, _stale, planted) == [True]


def _units(planted):
    apply = build.apply_fsdp
    with plant(planted, build, "apply_fsdp", lambda model, blocks, *rest: apply(model, [], *rest)):
        try:
            tiny.make_program(2, 3, 1, 2)
        except BadLayout as error:
            return str(error)
    return "sound"


def wrap_that_matches_nothing(ranks, _directory, planted):
    assert ranks.run(2, _units, planted) == ["sound"] * 2


# ---- recipe


def peak_by_substring(_ranks, _directory, planted):
    table = {"A100 SXM 80GB": 312e12, "H100 SXM": 989e12, "RTX 4090": 165e12}

    def find(name):
        peak = next((peak for key, peak in table.items() if key in name), 100e12)
        return dataclasses.replace(hardware.DEVICES[0], peak_flops=peak)

    real = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H200": 989.4e12,
        "Tesla T4": 65e12,
        "NVIDIA Nothing 9000": None,
    }
    with plant(planted, hardware, "find_device", find):
        for name, peak in real.items():
            device = hardware.find_device(name)
            assert (device.peak_flops if device else None) == peak, name


def resume_from_nothing(_ranks, directory, planted):
    (directory / "empty").mkdir()
    config = recipes.recipe(directory, run={"start_from": str(directory / "empty"), "start_what": "all"})
    refused = False
    with plant(planted, drift, "candidates", lambda path: []):
        try:
            drift.begun(config)
        except UserError:
            refused = True
    assert refused


def rate_read_as_text(_ranks, _directory, planted):
    import yaml

    with plant(planted, recipe, "_Loader", yaml.SafeLoader):
        assert recipe.parse_yaml("rate: 3e-4", "a recipe") == {"rate": 3e-4}


def batch_rounded_up(_ranks, directory, planted):
    config = recipes.recipe(directory, run={"tokens_per_step": 256 * 16, "micro_batch": 1})
    with plant(planted, RunConfig, "accumulation", lambda self, ranks: -(-256 // ranks)):
        for ranks in (1, 8, 24, 512):
            try:
                assert config.accumulation(ranks) * ranks == 256, "what was asked for, or an error"
            except UserError:
                assert 256 % ranks


MISTAKES = (
    labels_shifted_twice,
    decay_lost_to_sharding,
    clip_per_rank,
    rate_rises_after_the_end,
    first_update_at_rate_zero,
    cache_in_training,
    peak_by_substring,
    mean_of_means,
    data_split_twice,
    weights_by_rank,
    optimizer_before_sharding,
    wrap_that_matches_nothing,
    resume_from_nothing,
    rate_read_as_text,
    batch_rounded_up,
    tie_counted_twice,
    head_forgotten,
    frozen_counted,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_it_is_not_made_and_where_planted_it_is_found(ranks, tmp_path, mistake):
    (tmp_path / "sound").mkdir()
    (tmp_path / "planted").mkdir()
    mistake(ranks, tmp_path / "sound", False)
    with pytest.raises(AssertionError) as caught:
        mistake(ranks, tmp_path / "planted", True)
    assert not isinstance(caught.value, RankFailed), "the ranks went on; it is the comparison that finds it"


def test_the_table_above_lists_them_all():
    assert __doc__ is not None
    listed = [line.split()[0] for line in __doc__.splitlines() if line.startswith("    ")][1:]
    assert listed == [mistake.__name__ for mistake in MISTAKES]
