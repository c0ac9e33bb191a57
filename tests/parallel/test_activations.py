"""What blocks keep is what was counted beforehand on fake tensors, and the choice within a budget is the cheapest one."""

import functools
import itertools
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parallel.tiny import make_program
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.parallel.activations import GIB, Kept, Workload, choose_recompute, count_kept, plan_recompute
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_silent_mesh
from windlass.parallel.stages import blocks_in_flight
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

ROWS, LENGTH = 2, 21
SIZES = {
    "vocab_size": 150,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": {"family": "llama", **SIZES},
    "mistral": {"family": "mistral", **SIZES, "sliding_window": 8},
    "qwen2": {"family": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {"family": "qwen3", **SIZES, "head_dim": 16},
    "smollm3": {"family": "smollm3", **SIZES, "pad_token_id": None, "no_rope_layer_interval": 3},
    "gpt2": {"family": "gpt2", "vocab_size": 150, "n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 40}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
BLOCK = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
BLOCK += [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
BLOCK += ["input_layernorm.weight", "post_attention_layernorm.weight"]
MIX = ("full", "selective", "full", "none", "selective")
PLANS = {"none": ("none",) * 5, "selective": ("selective",) * 5, "full": ("full",) * 5, "mix": MIX}
FROZEN = [
    "model.embed_tokens.weight",
    *(f"model.layers.0.{name}" for name in BLOCK),
    "model.layers.1.mlp.up_proj.weight",
]


class Inside(TorchDispatchMode):
    """Storages that operators make while a block's forward runs, the last block's output aside, and the first one's input."""

    def __init__(self, blocks, outside):
        super().__init__()
        self.is_inside, self.made, self.outside = False, {}, dict.fromkeys(map(key_of, outside))
        for block in blocks:
            block.register_forward_pre_hook(self.enter)
            block.register_forward_hook(self.leave)

    def enter(self, _block, args):
        if not self.made:
            self.outside.pop(key_of(args[0]))
            self.note(args[0])
        self.is_inside = True

    def leave(self, _block, _args, output):
        self.is_inside, self.last = False, key_of(output)

    def note(self, tensor):
        self.made.setdefault(key_of(tensor), (weak(tensor), tensor.untyped_storage().nbytes()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and key_of(tensor) not in self.outside:
                if self.is_inside:
                    self.note(tensor)
                elif key_of(tensor) not in self.made:
                    self.outside[key_of(tensor)] = weak(tensor)
        return result


def weak(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def key_of(tensor):
    return weak(tensor).cdata


def kept_really(layout, model, policy, plans, frozen=(), length=LENGTH, **parallel):
    """Of each plan: bytes alive after a forward that the blocks made, and those of them that autograd's own hook saw; here."""
    programs = (make_program(*layout, policy, model, plan=plan, frozen=frozen, **parallel) for plan in plans)
    return [_kept_really(program, length) for program in programs]


def _kept_really(program, length):
    ids = torch.randint(0, 150, (ROWS, length + 1), generator=torch.Generator().manual_seed(1))
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in program.model.parameters()]

    def pack(tensor):
        saved.setdefault(key_of(tensor), tensor.untyped_storage().nbytes())
        return tensor

    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    program.run([batch], torch.tensor(1.0))  # what is compiled and made once
    inside, saved = Inside(program.model.blocks, [ids, *local]), {}
    with inside, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = program._forward(batch)
    made = {key: value for key, value in inside.made.items() if key != inside.last}
    assert loss.requires_grad
    alive = sum(size for weak, size in made.values() if not weak.expired())
    return alive, sum(size for key, size in saved.items() if key in made)


def count(zero, model, policy, frozen=()):
    config, precision = ParallelConfig(zero=zero), precision_of(PrecisionConfig(policy=policy))
    architecture = ModelConfig.model_validate(model).architecture()
    return count_kept(Workload(architecture, config, precision, "cpu", (ROWS, LENGTH), frozen))


EVEN = 24  # tokens that 2 and 4 ranks cut
CUT_MODELS = {
    **{family: model | {"vocab_size": 152} for family, model in MODELS.items() if family != "gpt2"},
    "gpt2": {**MODELS["gpt2"], "vocab_size": 152},
    "olmo2": {"family": "olmo2", **SIZES, "vocab_size": 152, "pad_token_id": None},
    "kv1": {"family": "qwen3", **SIZES, "num_key_value_heads": 1},
}


def count_cut(world, model, policy, **parallel):
    """On a rank: what each block keeps of [ROWS, EVEN] tokens, counted over a mesh that sends nothing."""
    config, precision = ParallelConfig(**parallel), precision_of(PrecisionConfig(policy=policy))
    architecture = ModelConfig.model_validate(model).architecture()
    mesh = make_silent_mesh(config.layout(world), "cpu")
    return count_kept(Workload(architecture, config, precision, "cpu", (ROWS, EVEN)), mesh)


CUTS = {
    "tp": {"tp": 2},
    "allgather": {"context": 2},
    "ulysses": {"context": 2, "context_kind": "ulysses"},
    "tp context": {"tp": 2, "context": 2},
    "allgather3": {"context": 3},
    "tp of zero 0": {"tp": 2, "zero": 0},
    "tp and shard": {"tp": 2, "shard": 2},
}
CUT = [
    *[("qwen3", "fp32", cut) for cut in ("tp", "allgather", "ulysses")],
    *[("qwen3", "bf16", cut) for cut in CUTS],
    *[(family, "bf16", cut) for family in CUT_MODELS for cut in ("tp", "allgather", "ulysses") if family != "qwen3"],
    ("qwen3", "fp64", "tp context"),
]
CUT_QUICK = [("qwen3", "fp32", "tp"), ("qwen3", "bf16", "allgather"), ("llama", "bf16", "ulysses")]


@pytest.mark.parametrize(
    ("family", "policy", "cut"),
    [pytest.param(*case, marks=() if case in CUT_QUICK else pytest.mark.long) for case in CUT],
)
def test_ranks_that_share_blocks_keep_what_was_counted(ranks, family, policy, cut):
    parallel = {"zero": 3, "shard": 1} | CUTS[cut]
    zero, shard = parallel["zero"], parallel["shard"]
    world = shard * parallel.get("tp", 1) * parallel.get("context", 1)
    apart = {key: value for key, value in parallel.items() if key not in ("zero", "shard")}
    keep = functools.partial(kept_really, length=EVEN, **apart)
    really = ranks.run(world, keep, (world, zero, 1, shard), CUT_MODELS[family], policy, list(PLANS.values()))
    counted = ranks.run(world, functools.partial(count_cut, **parallel), world, CUT_MODELS[family], policy)
    assert counted == counted[:1] * world, "every rank counts the same"
    for (name, plan), *alive in zip(PLANS.items(), *really, strict=True):
        assert [number for number, _ in alive] == [total(counted[0], plan)] * world, name


class InStages(Inside):
    """The same of a pipeline rank's stages and several micro-batches, without what a stage is given and hands on; `most`: bytes
    alive at once, after a forward."""

    def __init__(self, parts):
        super().__init__(
            [block for part in parts for block in part.blocks], [p for part in parts for p in part.parameters()]
        )
        self.most, self.ends = 0, [part.blocks[-1] for part in parts]

    def enter(self, _block, args):
        if key_of(args[0]) not in self.made:
            self.outside[key_of(args[0])] = weak(args[0])
        self.is_inside = True

    def leave(self, block, _args, output):
        self.is_inside = False
        if block in self.ends:
            self.outside[key_of(output)] = self.made.pop(key_of(output))[0]
            self.most = max(self.most, sum(size for weak, size in self.made.values() if not weak.expired()))


def most_kept(pp, schedule, num_micro, plan):
    """On a pipeline rank: InStages.most of a step."""
    program = make_program(pp, 0, model=MODELS["qwen3"], plan=plan, pp=pp, schedule=schedule)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 150, (ROWS, LENGTH + 1), generator=generator) for _ in range(num_micro)]
    with InStages(program.parts) as inside:
        program.run([{"input_ids": one[:, :-1], "targets": one[:, 1:]} for one in ids], torch.tensor(1.0))
    return inside.most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", pytest.param("interleaved-1f1b", marks=pytest.mark.long)])
def test_a_pipeline_rank_keeps_what_was_counted_of_all_micro_batches_in_flight(ranks, schedule):
    kept, num_micro, row = count(0, MODELS["qwen3"], "fp32"), 4, ROWS * LENGTH * 48 * 4
    architecture = ModelConfig.model_validate(MODELS["qwen3"]).architecture()
    of_ranks = blocks_in_flight(architecture, ParallelConfig(pp=2, schedule=schedule), num_micro)
    for name, plan in PLANS.items():
        given = [
            sum(row * number for index, number in blocks.items() if index - 1 not in blocks) for blocks in of_ranks
        ]
        counted = [
            sum(getattr(kept[index].times(number), plan[index]) for index, number in blocks.items()) - inputs
            for blocks, inputs in zip(of_ranks, given, strict=True)
        ]
        alive = ranks.run(2, most_kept, 2, schedule, num_micro, plan)
        if schedule == "interleaved-1f1b":  # its two stages are not at their most at once
            assert all(0.7 * most <= there <= most for there, most in zip(alive, counted, strict=True)), name
        else:
            assert alive == counted, name


def total(kept, plan):
    return sum(getattr(block, kind) for block, kind in zip(kept, plan, strict=True))


CASES = [("fp32", 1, 3), ("fp64", 1, 3), ("bf16", 1, 3), ("bf16", 1, 0), ("bf16", 2, 3)]
QUICK = [("qwen3", "fp32", 1, 3), ("qwen3", "bf16", 1, 0), ("gpt2", "bf16", 1, 3)]
EVERY = [
    pytest.param(family, *case, marks=() if (family, *case) in QUICK else pytest.mark.long)
    for family in MODELS
    for case in CASES
]


@pytest.mark.parametrize(("family", "policy", "world", "zero"), EVERY)
def test_blocks_keep_what_was_counted(ranks, family, policy, world, zero):
    kept = count(zero, MODELS[family], policy)
    really = ranks.run(world, kept_really, (world, zero, 1, world), MODELS[family], policy, list(PLANS.values()))[0]
    for (name, plan), (alive, saved) in zip(PLANS.items(), really, strict=True):
        assert alive == total(kept, plan), name
        if name in (
            "none",
            "full",
        ):  # what selective keeps is in a table of checkpoint's, where autograd's hook sees nothing
            assert saved == alive, name


def test_frozen_parts_keep_less_and_are_counted_so(ranks):
    kept, free = count(3, MODELS["qwen3"], "fp32", FROZEN), count(3, MODELS["qwen3"], "fp32")
    really = ranks.run(1, kept_really, (1, 3, 1, 1), MODELS["qwen3"], "fp32", list(PLANS.values()), FROZEN)[0]
    assert [alive for alive, _ in really] == [total(kept, plan) for plan in PLANS.values()]
    assert kept[0].none == 0 < kept[1].none < kept[2].none == free[2].none, "block 0 has no gradient at all"


def saved_compiled(model, policy, plans):
    """Of each plan, compiled: bytes that autograd's hook sees while blocks run, parameters aside. (For GPT-2: no rope tables.)"""
    return [_saved_compiled(make_program(1, 3, 1, 1, policy, model, plan=plan, compile=True)) for plan in plans]


def _saved_compiled(program):
    ids = torch.randint(0, 150, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    program.run([batch], torch.tensor(1.0))
    saved, own, inside = {}, set(map(key_of, program.model.parameters())), []

    def pack(tensor):
        if inside and key_of(tensor) not in own:
            saved.setdefault(key_of(tensor), tensor.untyped_storage().nbytes())
        return tensor

    # not at the blocks: hooks of a compiled module are compiled with it
    program.model.model.embed_tokens.register_forward_hook(lambda *_: inside.append(True))
    program.model.model.norm.register_forward_pre_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = program._forward(batch)
    assert loss.requires_grad
    return sum(saved.values())


@pytest.mark.long
def test_compiled_blocks_keep_no_more_than_was_counted(ranks):
    kept = count(3, MODELS["gpt2"], "fp32")
    really = ranks.run(1, saved_compiled, MODELS["gpt2"], "fp32", list(PLANS.values()), timeout_s=300)[0]
    print(really, [total(kept, plan) for plan in PLANS.values()])
    positions, generator = (
        8 * LENGTH,
        torch.get_rng_state().numel(),
    )  # learned positions; one state per recomputed block
    for (name, plan), saved in zip(PLANS.items(), really, strict=True):
        more = positions + generator * (5 - plan.count("none"))
        assert total(kept, PLANS["full"]) <= saved <= total(kept, plan) + more, name


# ---- the choice

ALIKE = [Kept(none=34, selective=20, full=2)] * 4
UNEQUAL = [Kept(40, 20, 4), Kept(34, 20, 2), Kept(34, 20, 2), Kept(12, 14, 2), Kept(34, 18, 2)]


def cheapest(kept, budget):
    """(full, selective) of the cheapest mix that fits, found by trying all."""
    kinds = itertools.product(("none", "selective", "full"), repeat=len(kept))
    fitting = [mix for mix in kinds if total(kept, mix) <= budget]
    return min((mix.count("full"), mix.count("selective")) for mix in fitting)


@pytest.mark.parametrize("budget", range(8, 140, 3))
def test_the_choice_is_the_cheapest_that_fits(budget):
    kinds = choose_recompute(ALIKE, budget)
    assert total(ALIKE, kinds) <= budget
    assert (kinds.count("full"), kinds.count("selective")) == cheapest(ALIKE, budget)
    assert list(kinds) == sorted(kinds, key=["full", "selective", "none"].index), "what is computed again comes first"


@pytest.mark.parametrize("budget", range(12, 160, 4))
def test_unequal_blocks_fit_too_and_are_near_the_cheapest(budget):
    kinds = choose_recompute(UNEQUAL, budget)
    assert total(UNEQUAL, kinds) <= budget
    assert kinds.count("full") <= cheapest(UNEQUAL, budget)[0] + 1
    assert kinds[3] != "selective", "a block for which selective keeps more than none does not use it"


def plan(gib, rows=ROWS, model=MODELS["qwen3"]):
    config = ParallelConfig(recompute="selective", activation_gib=gib)
    architecture, precision = (
        ModelConfig.model_validate(model).architecture(),
        precision_of(PrecisionConfig(policy="fp32")),
    )
    return plan_recompute(Workload(architecture, config, precision, "cpu", (rows, LENGTH)))


def test_a_budget_is_kept_and_used_and_said(ranks):
    kept = count(3, MODELS["qwen3"], "fp32")
    for budget in (total(kept, MIX), total(kept, PLANS["selective"]) + kept[0].none, total(kept, PLANS["none"])):
        chosen = plan(budget / GIB)
        [(alive, _)] = ranks.run(1, kept_really, (1, 3, 1, 1), MODELS["qwen3"], "fp32", [chosen.kinds])[0]
        assert alive == chosen.kept_bytes <= budget
        assert alive > budget - kept[0].none, "no block could have kept more"
    everything = f"{total(kept, PLANS['none']) / 1024:.1f} KiB"
    assert str(plan(1.0)) == f"recompute in 5 blocks: 5 none; they keep {everything} per micro-batch"
    assert str(plan(total(kept, MIX) / GIB)).startswith("recompute in 5 blocks: 4 selective, 1 full; they keep")


def test_without_a_budget_all_blocks_do_what_the_recipe_says():
    architecture, precision = (
        ModelConfig.model_validate(MODELS["llama"]).architecture(),
        precision_of(PrecisionConfig(policy="fp32")),
    )
    work = Workload(architecture, ParallelConfig(recompute="full"), precision, "cpu", (ROWS, LENGTH))
    chosen = plan_recompute(work)
    assert chosen.kinds == ("full",) * 5 and str(chosen) == "recompute full"


def test_a_budget_that_full_recomputation_cannot_meet_names_what_works():
    inputs = 5 * ROWS * LENGTH * 48 * 4
    with pytest.raises(UserError) as caught:
        plan(inputs / GIB * 0.6)
    assert f"micro-batches of {ROWS} x {LENGTH} tokens" in caught.value.given
    assert f"{inputs / 1024:.1f} KiB" in caught.value.rule
    gib, rows = re.fullmatch(
        r"use parallel.activation_gib=(.*), or run.micro_batch=(\d+)", caught.value.change
    ).groups()
    assert set(plan(float(gib)).kinds) == {"full"}
    assert set(plan(inputs / GIB * 0.6, rows=int(rows)).kinds) == {"full"}
    with pytest.raises(UserError) as caught:
        plan(1e-9)
    assert "micro_batch" not in caught.value.change, "no micro-batch is small enough"
