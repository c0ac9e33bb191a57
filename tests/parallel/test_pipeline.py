"""What a pipeline sends, counted; shapes that change between steps; precision policies; compiled blocks; the invariants."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor

from tests.parallel import tiny
from windlass.errors import BadLayout
from windlass.parallel import pipeline
from windlass.parallel.ddp import IN_FLIGHT, sum_over_replicas
from windlass.parallel.fsdp import fsdp_units
from windlass.parallel.rules.schedules import KINDS
from windlass.parallel.stages import cut_stages
from windlass.proof.pool import RankFailed
from windlass.units import MIB

MODEL = {**tiny.MODEL, "num_hidden_layers": 5}
HIDDEN, ROWS, LENGTH, MICRO = 24, 256, 8, 4  # rows: the padded vocabulary


def sent(world, tied, **layout):
    """Elements that this rank sends in the second step (the first learns shapes), by kind, and calls."""
    counted, calls = Counter(), Counter()

    def count(kind, tensors):
        counted[kind] += sum(tensor.numel() for tensor in tensors)
        calls[kind] += len(tensors)

    def counting(kind, original):
        def operations(self, chunk):
            found = original(self, chunk)
            count(kind, [operation.tensor for operation in found])
            return found

        return operations

    def counting_call(kind, original):
        def call(tensor, *args, **kwargs):
            count(kind, [tensor])
            return original(tensor, *args, **kwargs)

        return call

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if "tp" in layout else {}
    program = tiny.make_program(world, model={**MODEL, **heads, "tie_word_embeddings": tied}, **layout)
    batches = [tiny.batch(seed) for seed in range(MICRO)]
    program.run(batches, torch.tensor(32.0))
    with (
        mock.patch.object(PipelineStage, "get_fwd_send_ops", counting("hidden", PipelineStage.get_fwd_send_ops)),
        mock.patch.object(PipelineStage, "get_bwd_send_ops", counting("hidden", PipelineStage.get_bwd_send_ops)),
        mock.patch.object(dist, "send", counting_call("tie", dist.send)),
        mock.patch.object(dist, "all_reduce", counting_call("all_reduce", dist.all_reduce)),
    ):
        program.run(batches, torch.tensor(32.0))
        step = (dict(counted), dict(calls))
        counted.clear()
        calls.clear()
        program.evaluate(batches)
    return step, (dict(counted), dict(calls))


def total(results, which, kind):
    return [sum(result[which][part].get(kind, 0) for result in results) for part in (0, 1)]


@pytest.mark.parametrize("schedule", KINDS)
def test_messages_are_those_of_the_docstring(ranks, schedule):
    both = ranks.run(2, tiny.each, *(partial(sent, 2, tied, zero=0, pp=2, schedule=schedule) for tied in (True, False)))
    for tied, results in zip((True, False), zip(*both, strict=True), strict=True):
        assert_messages(schedule, tied, results)


def assert_messages(schedule, tied, results):
    stages = 2 * KINDS[schedule].stages_per_rank
    borders = stages - (2 if schedule == "zbv" else 1)
    hidden = LENGTH * HIDDEN
    assert total(results, 0, "hidden") == [2 * MICRO * borders * hidden, 2 * MICRO * borders]
    ends = tied and schedule != "zbv"  # in a V both ends are on one rank
    assert total(results, 0, "tie") == [2 * ROWS * HIDDEN * ends, 2 * ends]
    assert total(results, 0, "all_reduce") == [2, 2], "the loss, to all stages"
    elements = MICRO * borders * hidden + ROWS * HIDDEN * ends
    assert total(results, 1, "tie") == [elements, MICRO * borders + ends], "evaluation sends forward only"


def test_under_fsdp_the_ends_send_their_shards_and_replicas_one_message_per_bucket(ranks):
    layouts = {"zero": 1, "shard": 2}, {"zero": 0, "replicate": 2}
    sharded, copies = zip(*ranks.run(4, tiny.each, *(partial(sent, 4, True, pp=2, **layout) for layout in layouts)))
    assert total(sharded, 0, "tie") == [2 * ROWS * HIDDEN, 4]
    assert total(copies, 0, "tie") == [4 * ROWS * HIDDEN, 4]
    assert total(copies, 0, "all_reduce")[1] == 4 + 2 * 4, (
        "one bucket of gradients; the loss over replicas and over stages"
    )


def test_beside_tensor_ranks_each_sends_its_positions_and_its_rows_of_the_tie(ranks):
    results = ranks.run(4, partial(sent, 4, True, zero=1, pp=2, tp=2))
    assert total(results, 0, "hidden") == [2 * MICRO * LENGTH * HIDDEN, 2 * 2 * MICRO], (
        "in all as much, in twice the messages"
    )
    assert total(results, 0, "tie") == [2 * ROWS * HIDDEN, 2 * 2]


def sent_in_backward(zero, schedule, policy):
    """In the second step, after each backward of this rank that has gradients of weights: reductions so far, and the dtypes of
    whole gradients. Then the number of units, and of parameters that are still gathered after the step."""
    program = tiny.make_program(4, policy=policy, model=MODEL, zero=zero, pp=2, shard=2, schedule=schedule)
    batches = [tiny.batch(seed) for seed in range(MICRO)]
    program.run(batches, torch.tensor(32.0))
    operators, found = tiny.Operators(), []
    units = [unit for part in program.parts for unit in fsdp_units(part)]
    groups = [group for unit in units for group in fully_shard.state(unit)._fsdp_param_groups]

    def watch(backward):
        def watched(*args, full_backward=True, **kwargs):
            backward(*args, **kwargs, **({} if full_backward else {"full_backward": False}))
            if full_backward:
                held = [one for group in groups for one in group.fsdp_params]
                whole = [sums for one in held for sums in (one.unsharded_accumulated_grad, one._unsharded_param.grad)]
                dtypes = {str(one.dtype) for one in whole if one is not None}
                found.append((operators.collectives().get("reduce_scatter_base", 0), dtypes))

        return watched

    for stages in program._schedules.values():
        for stage in [stages._stage] if KINDS[schedule].stages_per_rank == 1 else stages._stages:
            stage.backward_one_chunk = watch(stage.backward_one_chunk)
            stage.backward_weight_one_chunk = watch(stage.backward_weight_one_chunk)
    with operators:
        program.run(batches, torch.tensor(32.0))
    gathered = [one for part in program.parts for one in part.parameters() if not isinstance(one, DTensor)]
    return found, len(groups), len(gathered)


@pytest.mark.parametrize("schedule", KINDS)
def test_zero_2_reduces_on_every_micro_batch_and_zero_1_on_the_last_what_it_added_up_in_fp32(ranks, schedule):
    calls = (partial(sent_in_backward, zero, schedule, "bf16") for zero in (1, 2))
    stages = KINDS[schedule].stages_per_rank
    for zero, results in zip((1, 2), zip(*ranks.run(4, tiny.each, *calls), strict=True), strict=True):
        for found, units, gathered in results:
            assert len(found) == MICRO * stages and not gathered, "the next step computes with the new weights"
            assert found[-1] == (units * (MICRO if zero == 2 else 1), set()), "nothing stays whole"
            waiting = {dtype for _, dtypes in found for dtype in dtypes}
            assert waiting == (set() if zero == 2 else {"torch.float32"})


def summed(bucket_bytes):
    mine = float(dist.get_rank() + 1)
    gradients = [torch.full((size,), mine * size) for size in (3, 5, 2, 8, 1)]
    waiting, most, dtypes, original = set(), [], set(), dist.all_reduce

    def watched(flat, **kwargs):
        dtypes.add(flat.dtype)
        work, number = original(flat, **kwargs), len(most)
        waiting.add(number)
        most.append(len(waiting))

        def wait():
            waiting.remove(number)
            work.wait()

        return SimpleNamespace(wait=wait)

    with mock.patch.object(dist, "all_reduce", watched):
        sum_over_replicas(gradients, dist.group.WORLD, bucket_bytes / MIB, torch.float64)
    return [gradient.unique().tolist() for gradient in gradients], len(most), dtypes, max(most)


def test_replicas_are_summed_bucket_by_bucket(ranks):
    sums = [[9.0], [15.0], [6.0], [24.0], [3.0]]
    for found in ranks.run(2, tiny.each, *(partial(summed, bucket_bytes) for bucket_bytes in (1, 17, 32, 1 << 20))):
        assert [one[:3] for one in found] == [(sums, calls, {torch.float64}) for calls in (5, 4, 3, 1)], "as sent"
        assert [most for *_, most in found] == [IN_FLIGHT, IN_FLIGHT, IN_FLIGHT, 1], "sent and not yet taken"


def shapes(world, **layout):
    """Losses of steps whose micro-batches differ in number and length, and of an evaluation between them."""
    program, found = tiny.make_program(world, policy="fp64", model=MODEL, **layout), []
    for num_micro, length in ((4, 8), (2, 5), (4, 8), (6, 8)):
        batches = [{k: v[:, :length] for k, v in tiny.batch(seed).items()} for seed in range(num_micro)]
        found.append(program.run(batches, torch.tensor(float(num_micro * length))).item())
        found.append(program.evaluate(batches[:1]).item())
    return found


def test_another_number_or_length_of_micro_batches_gets_another_schedule(ranks):
    expected = ranks.run(1, shapes, 1)[0]
    calls = (partial(shapes, 2, zero=1, pp=2, schedule=schedule) for schedule in ("1f1b", "zbv"))
    for results in ranks.run(2, tiny.each, *calls):
        assert results == [pytest.approx(expected, rel=1e-12)] * 2


def steps(world, policy, **layout):
    """Losses and gradients of two steps. Untied, since one process adds a tied head's gradient to the embedding's in bf16."""
    precision, model = layout.pop("precision", None), {**MODEL, "tie_word_embeddings": False}
    program = tiny.make_program(world, policy=policy, model=model, precision=precision, **layout)
    batches, found = [tiny.batch(seed) for seed in range(MICRO)], []
    for _ in range(2):
        loss = program.run(batches, torch.tensor(32.0)).item()
        found.append((loss, {record.name: tiny.full(record.tensor.grad) for record in program.records()}))
        for record in program.records():
            record.tensor.grad = None
        found.append((program.evaluate(batches).item() / 32, {}))
    return found


POLICIES = [("bf16", {}), ("fp16", {}), ("bf16", {"output": "bf16"}), ("bf16", {"reduce": "bf16"}), ("bf16-pure", {})]


@pytest.mark.parametrize(
    ("zero", "schedule"),
    [
        (0, "1f1b"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [(1, "interleaved-1f1b"), (1, "1f1b"), (0, "zbv")]),
    ],
)
def test_a_policy_is_that_of_one_process(ranks, zero, schedule):
    def trained(world, **layout):
        calls = (partial(steps, world, one, zero=zero, precision=more, **layout) for one, more in POLICIES)
        return zip(*ranks.run(world, tiny.each, *calls), strict=True)

    for (_, more), (one,), results in zip(POLICIES, trained(1), trained(2, pp=2, schedule=schedule), strict=True):
        # FSDP's stages add up micro-batches in the dtype of reductions, one process in fp32: four roundings by 2^-8
        tolerance = 2**-6 if zero and more.get("reduce") == "bf16" else 1e-5
        for step, (loss, gradients) in enumerate(one):
            assert all(result[step][0] == pytest.approx(loss, rel=1e-5) for result in results)
            found = {name: gradient for result in results for name, gradient in result[step][1].items()}
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


def without_a_stage(lost):
    """The gradients of one stage, or of the mirror, vanish in the first step."""
    program = tiny.make_program(2, zero=0, pp=2, model=MODEL)
    reduce = pipeline.PipelineProgram._reduce

    def lose(self):
        chosen = [self._tie.head] if lost == "mirror" else list(self.parts[0].parameters())
        for parameter in chosen:
            if parameter is not None and dist.get_rank() == 1:
                parameter.grad = None
        reduce(self)

    with mock.patch.object(pipeline.PipelineProgram, "_reduce", lose):
        program.run([tiny.batch(seed) for seed in range(MICRO)], torch.tensor(32.0))


@pytest.mark.parametrize(("lost", "named"), [("mirror", "lm_head.weight"), ("stage", "model.layers.")])
def test_a_stage_without_gradients_stops_the_first_step(ranks, lost, named):
    with pytest.raises(
        RankFailed, match=rf"{BadLayout.__name__}: .* got no gradient in the first step, the first is {named}"
    ):
        ranks.run(2, without_a_stage, lost)


def whereabouts(pp, schedule):
    program = tiny.make_program(pp, zero=1, pp=pp, schedule=schedule, model=MODEL)
    return [[int(index) for index in part.model.layers] for part in program.parts]


def test_a_rank_holds_the_stages_of_the_cut(ranks):
    program = ranks.run(2, whereabouts, 2, "zbv")
    from windlass.model.config import ModelConfig

    stages = cut_stages(ModelConfig.model_validate(MODEL).architecture(), 2, "zbv")
    expected = [[list(stages.layers[stage]) for stage in stages.of_rank(rank)] for rank in range(2)]
    assert program == expected and sum(map(len, sum(expected, []))) == 5
