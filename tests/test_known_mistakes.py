"""Mistakes that trainers in use have made without a word (tests/proof/bugs), each planted and found by what it spoils.

Every mistake is a function (ranks, directory) that asserts what is right; planted, the assertion must fail.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests import tiny as recipes
from tests.data.streams import open_bare
from tests.parallel import tiny
from tests.proof.bugs import BUGS
from tests.proof.planting import Planting, planted
from windlass import hardware, recipe
from windlass.data.shards.mds import Reader, Writer
from windlass.errors import BadLayout, UserError
from windlass.model import flops
from windlass.model.cache import KVCache
from windlass.model.config import ModelConfig
from windlass.model.transformer import Decoder
from windlass.optim import adamw, clip, groups, schedule
from windlass.optim.config import OptimConfig
from windlass.optim.rules import NO_RULES
from windlass.parallel import invariants
from windlass.parallel.records import Record
from windlass.proof.pool import RankFailed
from windlass.training.start import drift


def small_decoder():
    torch.manual_seed(2)
    return Decoder(ModelConfig.model_validate(tiny.MODEL).architecture())


# ---- data


def labels_shifted_twice(_ranks, directory):
    ids = np.random.default_rng(1).integers(0, 150, (6, 10), np.int32)
    writer = Writer(directory / "train", 10, 4096)
    writer.write(ids, ids)
    writer.close()
    settings = {"sequence_length": 9, "micro_batch": 6, "accumulation": 1, "batch_rank": 0, "batch_ranks": 1}
    reading = open_bare(directory / "train", **settings, seed=0, shuffle_window=1)
    (batch,) = reading.next()
    reading.close()
    decoder = small_decoder()
    with torch.no_grad():
        mean = decoder(**batch) / (batch["targets"] != -100).sum()
        stored_BT = torch.from_numpy(ids).long()
        logits_BTV = decoder(stored_BT)[:, :-1]  # what is after position t is the target of position t, once
        expected = functional.cross_entropy(logits_BTV.flatten(0, 1), stored_BT[:, 1:].flatten())
    assert abs(mean - expected) < 1e-5


def data_split_twice(_ranks, directory):
    ids = np.repeat(np.arange(24, dtype=np.int32)[:, None], 5, 1)
    writer = Writer(directory / "train", 5, 200)
    writer.write(ids, ids)
    writer.close()
    assert len(Reader(directory / "train").shard_samples) > 1
    seen = []
    for rank in range(2):
        settings = {"sequence_length": 4, "micro_batch": 2, "accumulation": 3, "batch_rank": rank, "batch_ranks": 2}
        reading = open_bare(directory / "train", **settings, seed=0, shuffle_window=2)
        seen += [row for _ in range(2) for batch in reading.next() for row in batch["input_ids"][:, 0].tolist()]
        reading.close()
    assert sorted(seen) == list(range(24)), "an epoch is every sample once, over all ranks"


# ---- optimizer


def _decayed():
    program = tiny.make_program(2, 3, 1, 2)
    made = groups.parameter_groups(program.records(), OptimConfig(), NO_RULES)
    return sum(len(group["params"]) for group in made if group["weight_decay"] > 0)


def decay_lost_to_sharding(ranks, _directory):
    assert ranks.run(2, _decayed) == [1 + 7 * tiny.BLOCKS] * 2


def _norms():
    program = tiny.make_program(2, 3, 1, 2, "fp64")
    program.run([tiny.batch(program.mesh.batch_rank)], torch.tensor(16.0))
    whole = [tiny.full(record.tensor.grad) for record in program.records()]
    norm = clip.gradient_norm(program.records(), program.mesh.pp_group)
    clip.divide_gradients([record.tensor for record in program.records()], clip.clip_divisor(norm, 0.01))
    clipped = [tiny.full(record.tensor.grad) for record in program.records()]
    return norm.item(), torch.nn.utils.get_total_norm(whole).item(), torch.nn.utils.get_total_norm(clipped).item()


def clip_per_rank(ranks, _directory):
    for norm, true, after in ranks.run(2, _norms):
        assert norm == pytest.approx(true, rel=1e-12) and after == pytest.approx(0.01, rel=1e-3)


def rate_rises_after_the_end(_ranks, _directory):
    config = OptimConfig(learning_rate=1.0, warmup_steps=2)
    rates = [schedule.learning_rate(step, 10, config) for step in range(20)]
    assert max(rates[9:]) == pytest.approx(0.1), "clamped to the floor"


def first_update_at_rate_zero(_ranks, _directory):
    assert schedule.learning_rate(0, 10, OptimConfig(learning_rate=1.0, warmup_steps=2)) == 0.5


# ---- model


def cache_in_training(_ranks, _directory):
    decoder, refused = small_decoder(), False
    cache = KVCache(decoder.arch, 1, 8, dtype=torch.float32)
    try:
        decoder(tiny.batch()["input_ids"], cache=cache).sum().backward()
    except UserError:
        refused = True
    assert refused


def _initial():
    program = tiny.make_program(2, 3, 1, 2)
    return {record.name: tiny.full(record.tensor) for record in program.records()}


def _initial_alone():
    return {record.name: tiny.full(record.tensor) for record in tiny.make_program(1).records()}


def weights_by_rank(ranks, _directory):
    (alone,) = ranks.run(1, _initial_alone)
    for weights in ranks.run(2, _initial):
        assert all(torch.equal(weights[name], value) for name, value in alone.items())


def tie_counted_twice(_ranks, _directory):
    for preset, billions in (("gpt2-1.3b", 1.316), ("gpt2-26b", 25.87), ("gpt2-65b", 64.86)):
        count = flops.count_parameters(ModelConfig(preset=preset).architecture())
        assert count == pytest.approx(billions * 1e9, rel=5e-4), preset


def head_forgotten(_ranks, _directory):
    arch = ModelConfig(preset="smollm3-3b").architecture()
    found = flops.flops_per_token(arch, 8192)
    assert (found.palm / 1e9, found.causal / 1e9) == (pytest.approx(25.70, abs=5e-3), pytest.approx(22.07, abs=5e-3))


def frozen_counted(_ranks, _directory):
    arch = ModelConfig.model_validate(tiny.MODEL).architecture()
    frozen = [name for name in flops.parameter_shapes(arch) if name != "model.norm.weight"]
    found = flops.flops_per_token(arch, 8, frozen)
    head = arch.vocab_size * arch.hidden_size
    forward = 2 * flops.count_multiplied(arch) + 4 * arch.num_layers * arch.num_heads * arch.head_dim * 8
    assert found.palm == forward + 2 * head, "forward, and through the head to the last norm"


# ---- layout


def _uneven_mean():
    program = tiny.make_program(1, 3, 1, 1, "fp64")
    batches = [tiny.batch(0), tiny.batch(1)]
    batches[1]["targets"] = torch.where(torch.arange(8) < 7, -100, batches[1]["targets"])
    nats = sum(program.evaluate([batch]).item() for batch in batches)
    return program.run(batches, torch.tensor(9.0)).item(), nats / 9


def mean_of_means(ranks, _directory):
    ((loss, expected),) = ranks.run(1, _uneven_mean)
    assert loss == pytest.approx(expected, rel=1e-12), "8 targets in one micro-batch, 1 in the other"


def _stale():
    program = tiny.make_program(1)
    before = [Record(r.name, torch.nn.Parameter(r.tensor.detach().clone()), r.logical_shape) for r in program.records()]
    optimizer = adamw.AdamW(before, OptimConfig())

    try:
        invariants.check_optimizer(optimizer.param_groups, program.records())
    except BadLayout:
        return True
    return False


def optimizer_before_sharding(ranks, _directory):
    assert ranks.run(1, _stale) == [True]


def _units():
    try:
        tiny.make_program(2, 3, 1, 2)
    except BadLayout as error:
        return str(error)
    return "sound"


def wrap_that_matches_nothing(ranks, _directory):
    assert ranks.run(2, _units) == ["sound"] * 2


# ---- recipe


def peak_by_substring(_ranks, _directory):
    real = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H200": 989.4e12,
        "Tesla T4": 65e12,
        "NVIDIA Nothing 9000": None,
    }
    for name, peak in real.items():
        device = hardware.find_device(name)
        assert (device.peak_flops if device else None) == peak, name


def resume_from_nothing(_ranks, directory):
    (directory / "empty").mkdir()
    config = recipes.recipe(directory, run={"start_from": str(directory / "empty"), "start_what": "all"})
    refused = False
    try:
        drift.begun(config)
    except UserError:
        refused = True
    assert refused


def rate_read_as_text(_ranks, _directory):

    assert recipe.parse_yaml("rate: 3e-4", "a recipe") == {"rate": 3e-4}


def batch_rounded_up(_ranks, directory):
    config = recipes.recipe(directory, run={"tokens_per_step": 256 * 16, "micro_batch": 1})
    for ranks in (1, 8, 24, 512):
        try:
            assert config.accumulation(ranks) * ranks == 256, "what was asked for, or an error"
        except UserError:
            assert 256 % ranks


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.mistake])
def test_it_is_not_made_and_where_planted_it_is_found(ranks, tmp_path, name):
    patches, right = BUGS[name].patches, globals()[BUGS[name].mistake]
    (tmp_path / "sound").mkdir()
    (tmp_path / "planted").mkdir()
    right(ranks, tmp_path / "sound")
    with pytest.raises(AssertionError) as caught, planted(patches):
        right(Planting(ranks, patches), tmp_path / "planted")
    assert not isinstance(caught.value, RankFailed), "the ranks went on; it is the comparison that finds it"
