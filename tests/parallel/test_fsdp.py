"""ZeRO-2, ZeRO-3 and HSDP: what is sent per step, counted to the call, and what is kept gathered."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.tiny import BLOCKS, MODEL, Operators, assert_equal, batch, each, gradients, make_program
from windlass.parallel.fsdp import fsdp_units
from windlass.plan.memory import gathered_units

UNITS = BLOCKS + 1
LAYOUTS = {
    "zero3": (2, 3, 1, 2),
    "zero2": (2, 2, 1, 2),
    "zero1": (2, 1, 1, 2),
    "hsdp": (4, 3, 2, 2),
    "hsdp-zero2": (4, 2, 2, 2),
    "hsdp-zero1": (4, 1, 2, 2),
}


UNTIED = {**MODEL, "tie_word_embeddings": False}


def count_step(layout, micro_batches, settings=None):
    """{collective: calls} of the second step (the first makes buffers), on this rank."""
    program = make_program(*layout, **settings or {})
    count = torch.tensor(8.0 * micro_batches * layout[0])
    for _ in range(2):
        program.model.zero_grad()
        with Operators() as mode:
            program.run([batch(i) for i in range(micro_batches)], count)
    return mode.collectives()


def expected(zero, replicate, micro_batches, units, ends=1):
    """The table of parallel/fsdp.py."""
    return {
        "allgather_base": units if zero in (1, 2) else micro_batches * (2 * units - ends),
        "reduce_scatter_base": units if zero == 1 else micro_batches * units,
        "allreduce": (units if replicate > 1 else 0) + 1,  # and the loss
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.long) if one.startswith("hsdp-") else one for one in LAYOUTS]
)
def test_fsdp_sends_what_its_docstring_says(ranks, layout):
    world, zero, replicate, _ = LAYOUTS[layout]
    cases = [(micro, model) for micro in (1, 3) for model in (MODEL, UNTIED)]
    calls = [partial(count_step, LAYOUTS[layout], micro, {"model": model}) for micro, model in cases]
    for counts in ranks.run(world, each, *calls):
        assert counts == [
            expected(zero, replicate, micro, *((UNITS, 1) if model is MODEL else (UNITS + 1, 2)))
            for micro, model in cases
        ]


class Sizes(TorchDispatchMode):
    """Bytes of what FSDP2's collectives give (all-gather) or take (the others), and their calls."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("c10d::").strip("_")
        if name in ("allgather_base", "reduce_scatter_base", "allreduce"):
            tensor = args[0][0] if name == "allreduce" else args[1 if name == "reduce_scatter_base" else 0]
            if tensor.dim():  # a 0-dim sum is the loss
                self.bytes[name] += tensor.nbytes
                self.calls[name] += 1
        return function(*args, **(kwargs or {}))


HEADED = {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}


def sizes_of_step(world, micro_batches, settings):
    """Bytes and calls of the second step, and (is it the root's?, shape of a tensor rank's part) of every parameter held here."""
    model = {**HEADED, "tie_word_embeddings": "pp" not in settings}  # a mirrored head is no record
    program = make_program(world, model=model, **settings)
    batches = [batch(index) for index in range(micro_batches)]
    for _ in range(2):
        for record in program.records():
            record.tensor.grad = None
        with Sizes() as sizes:
            program.run(batches, torch.tensor(8.0 * micro_batches * world))
    shapes = []
    for record in program.records():
        parts = [1] * record.tensor.dim()
        names, placements = record.tensor.device_mesh.mesh_dim_names, record.tensor.placements
        if "tp" in names and not placements[names.index("tp")].is_replicate():
            parts[placements[names.index("tp")].dim] = settings["tp"]
        shape = [size // part for size, part in zip(record.logical_shape, parts)]
        shapes.append((".layers." not in record.name, shape))
    return dict(sizes.bytes), dict(sizes.calls), shapes


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"zero": 3, "shard": 2}),
        (2, {"zero": 2, "shard": 2}),
        (2, {"zero": 1, "shard": 2}),
        (4, {"zero": 3, "shard": 2, "replicate": 2}),
        (2, {"zero": 3, "shard": 2, "policy": "bf16"}),
        pytest.param(4, {"zero": 3, "shard": 2, "tp": 2}, marks=pytest.mark.long),
        pytest.param(4, {"zero": 1, "shard": 2, "tp": 2}, marks=pytest.mark.long),
        (4, {"zero": 1, "shard": 2, "pp": 2, "schedule": "gpipe"}),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_the_bytes_are_those_of_the_docstring(ranks, world, settings):
    """n elements of a unit, padded to S equal shards of rows: an all-gather gives n b bytes, a reduce-scatter takes n r, an
    all-reduce a shard, n r / S. Beside tp a unit is of parts; in a pipeline each stage has units of its own."""
    shards, gathered = settings["shard"], 2 if settings.get("policy") == "bf16" else 4
    is_zero3, is_zero1 = settings["zero"] == 3, settings["zero"] == 1
    counts = 1, 3
    for found in ranks.run(world, each, *(partial(sizes_of_step, world, count, settings) for count in counts)):
        for micro_batches, (sizes, calls, shapes) in zip(counts, found, strict=True):
            elements = [(root, -(-shape[0] // shards) * shards * math.prod(shape[1:])) for root, shape in shapes]
            root, whole = sum(n for is_root, n in elements if is_root), sum(n for _, n in elements)
            expected = {
                "allgather_base": gathered * (micro_batches * (2 * whole - root) if is_zero3 else whole),
                "reduce_scatter_base": 4 * whole * (1 if is_zero1 else micro_batches),
            }
            if settings.get("replicate", 1) > 1:
                expected["allreduce"] = 4 * whole // shards
            if "tp" in settings:  # the head's, of the tensor ranks: test_tensor counts them
                sizes.pop("allreduce"), calls.pop("allreduce")
            assert sizes == expected
            if "pp" not in settings:
                assert calls["reduce_scatter_base"] == UNITS * (1 if is_zero1 else micro_batches)


@pytest.mark.parametrize("layout", ["zero3", "zero2", "zero1", pytest.param("hsdp", marks=pytest.mark.long)])
def test_larger_units_send_fewer_messages(ranks, layout):
    world, zero, replicate, _ = LAYOUTS[layout]
    sizes = [{"blocks_per_unit": blocks} for blocks in (2, 3)]  # of 3 blocks: 2 + 1, and all
    for counts in ranks.run(world, each, *(partial(count_step, LAYOUTS[layout], 2, size) for size in sizes)):
        assert counts == [expected(zero, replicate, 2, units) for units in (3, 2)]


SETTINGS = [
    {"blocks_per_unit": 2},
    {"prefetch": 1},
    {"prefetch": 3},
    {"blocks_per_unit": 2, "prefetch": 2, "recompute": "full"},
    {"offload": True},
    {"offload": True, "prefetch": 2},
]


@pytest.mark.parametrize(
    "layout", ["zero3", *(pytest.param(one, marks=pytest.mark.long) for one in ("hsdp", "zero2", "zero1"))]
)
def test_no_setting_changes_a_gradient(ranks, layout):
    calls = [partial(gradients, *LAYOUTS[layout], **settings) for settings in ({}, *SETTINGS)]
    plain, *found = ranks.run(LAYOUTS[layout][0], each, *calls)[0]
    for one in found:
        assert_equal(plain, one, 1e-13)


def order_of_messages(prefetch, model=MODEL):
    """What happened, in order, in one micro-batch under ZeRO-3: "g" a unit's all-gather, "r" its reduce-scatter, a digit a
    block's forward, "h" the head's; with "b" before it, the backward. The first gather is the root's, which backward finds
    gathered."""
    program = make_program(2, 3, 1, 2, prefetch=prefetch, model=model)
    program.run([batch()], torch.tensor(16.0))
    happened = []

    class Gathers(Operators):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            message = {"c10d::_allgather_base_": "g", "c10d::_reduce_scatter_base_": "r"}
            if function._schema.name in message:
                happened.append(message[function._schema.name])
            return super().__torch_dispatch__(function, types, args, kwargs)

    def note(word):
        def hook(*_):
            happened.append(word)

        return hook

    for index, block in enumerate(program.model.blocks):
        block.mlp.register_forward_pre_hook(note(str(index)))
        block.mlp.register_full_backward_pre_hook(note(f"b{index}"))
    program.model.lm_head.register_forward_pre_hook(note("h"))
    program.model.model.norm.register_full_backward_pre_hook(note("bh"))
    with Gathers():
        program.run([batch()], torch.tensor(16.0))
    return " ".join(happened)


ORDERS = {
    0: "g g 0 g 1 g 2 h g bh g b2 g b1 b0",  # torch's own: when the host reaches a block; in backward one ahead
    1: "g g g 0 g 1 2 h g bh g b2 g b1 b0",  # root and two: block 0 computes while block 1 arrives
    2: "g g g g 0 1 2 h g g bh g b2 b1 b0",  # backward begins at the root too: two arrive while the head's is computed
}


def test_prefetch_gathers_so_many_units_ahead(ranks):
    found = ranks.run(2, each, *(partial(order_of_messages, ahead) for ahead in ORDERS))
    assert [[order.replace("r ", "").replace(" r", "") for order in orders] for orders in found] == (
        [list(ORDERS.values())] * 2
    )


def gathered(prefetch):
    """Parameters that are gathered in each block's forward and backward under ZeRO-3, in units of blocks: whole ones, those under
    way, and the message that torch still keeps of the last one."""
    program = make_program(2, 3, 1, 2, prefetch=prefetch, model=MODEL | {"num_hidden_layers": 6})
    program.run([batch()], torch.tensor(16.0))
    states = [fully_shard.state(unit) for unit in fsdp_units(program.model)]
    groups = [group for state in states for group in (state._fsdp_param_group,) if group is not None]
    found = {"forward": [], "backward": []}

    def note(passing):
        def hook(*_):
            whole = sum(group._sharded_state.name == "UNSHARDED" for group in groups) - 1  # without the ends' unit
            under_way = sum(group._all_gather_result is not None for group in groups)
            found[passing].append(whole + under_way + (states[0]._comm_ctx.all_gather_state is not None))

        return hook

    for block in program.model.blocks:
        block.mlp.register_forward_pre_hook(note("forward"))
        block.mlp.register_full_backward_pre_hook(note("backward"))
    program.run([batch()], torch.tensor(16.0))
    return {passing: max(counts) for passing, counts in found.items()}


def test_as_many_units_are_gathered_at_once_as_the_planner_counts(ranks):
    for found in ranks.run(2, each, *(partial(gathered, ahead) for ahead in range(4))):
        assert [one["forward"] for one in found] == [gathered_units(ahead) for ahead in range(4)] == [2, 3, 4, 5]
        assert [one["backward"] for one in found] == [2, 2, 3, 4], "torch is one ahead by itself, and keeps no message"


UNTIED_ORDERS = {
    0: "g g 0 g 1 g 2 g h g bh r g b2 r g b1 r b0 r r",
    1: "g g g 0 g 1 g 2 h g bh r g b2 r g b1 r b0 r r",  # the head arrives while block 2 computes
    2: "g g g g 0 g 1 2 h g g bh r g b2 r b1 r b0 r r",
}


def test_the_gradient_of_an_untied_head_leaves_before_any_block_computes_its_own(ranks):
    found = ranks.run(2, each, *(partial(order_of_messages, ahead, UNTIED) for ahead in UNTIED_ORDERS))
    assert found == [list(UNTIED_ORDERS.values())] * 2


def offloaded(offload):
    """On a device that is not the host ("meta" here): where the parameters are, and the policy of every unit."""
    from unittest import mock

    from windlass.model.config import ModelConfig
    from windlass.parallel import fsdp
    from windlass.parallel.build import Parallelism, build_program
    from windlass.parallel.config import ParallelConfig
    from windlass.parallel.mesh import make_mesh
    from windlass.precision.config import PrecisionConfig
    from windlass.precision.policy import precision_of

    config, precision = ParallelConfig(offload=offload), precision_of(PrecisionConfig(policy="fp32"))
    policies = []

    fully_shard = fsdp.fully_shard

    def shard(module, **settings):
        policies.append(settings["offload_policy"])
        return fully_shard(module, **settings)

    shard.state = fully_shard.state
    with mock.patch.object(fsdp, "fully_shard", shard):
        mesh = make_mesh(config.layout(2), "cpu")
        architecture = ModelConfig.model_validate(MODEL).architecture()
        parallelism = Parallelism(config, precision, mesh, torch.device("meta"))
        program = build_program(architecture, parallelism, lambda named: None)
    devices = {record.tensor.to_local().device.type for record in program.records()}
    return devices, [(type(policy).__name__, getattr(policy, "pin_memory", None)) for policy in policies]


def test_offload_puts_every_unit_into_the_hosts_memory(ranks):
    # pinned memory needs a GPU, and there is none here
    found = [({"cpu"}, [("CPUOffloadPolicy", False)] * UNITS), ({"meta"}, [("OffloadPolicy", None)] * UNITS)]
    assert ranks.run(2, each, partial(offloaded, True), partial(offloaded, False)) == [found] * 2


def invariants_of(blocks_per_unit):
    return len(fsdp_units(make_program(2, 3, 1, 2, blocks_per_unit=blocks_per_unit).model))


def test_units_are_counted_as_units_and_not_as_modules(ranks):
    assert ranks.run(2, each, *(partial(invariants_of, blocks) for blocks in (1, 2, 3))) == [[4, 3, 2]] * 2


def gathered_after(layout):
    """(after a step, after an evaluation, after a step that an evaluation preceded): units left gathered on this rank, and
    whether that step saw the weights of its own time."""
    program = make_program(*layout, "fp64")
    count = torch.tensor(8.0 * layout[0])

    def gathered():
        return sum(not isinstance(next(unit.parameters()), DTensor) for unit in fsdp_units(program.model))

    left, losses = [], []
    for _ in range(2):
        losses.append(program.run([batch(0), batch(1)], count).item())
        left.append(gathered())
        with torch.no_grad():
            for record in program.records():
                record.tensor.mul_(0.5)
        losses.append(program.evaluate([batch(0), batch(1)]).item() / count.item())
        left.append(gathered())
    return left, losses


@pytest.mark.parametrize("layout", ["zero3", "zero2"])
def test_nothing_stays_gathered_between_steps_and_no_weight_is_stale(ranks, layout):
    for left, losses in ranks.run(2, gathered_after, LAYOUTS[layout]):
        assert left == [0, 0, 0, 0]
        assert losses[1] == pytest.approx(losses[2], rel=1e-12), "evaluation and the step after it see the same weights"
        assert abs(losses[1] - losses[0]) > 1e-4, "the weights were changed in between"


def units_of(policy, precision=None):
    return len(fsdp_units(make_program(1, 3, 1, 1, policy, precision=precision).model))


def test_one_process_is_wrapped_only_where_it_multiplies_in_a_wider_dtype_than_it_stores(ranks):
    assert [ranks.run(1, units_of, policy) for policy in ("fp32", "bf16", "bf16-pure")] == [[0]] * 3
    assert ranks.run(1, units_of, "bf16-pure", {"parameters": "fp32"}) == [UNITS]
