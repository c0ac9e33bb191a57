"""The techniques in their one order: a compiled block changes nothing, names stay, no rank builds what it does not keep."""

from functools import partial
from unittest import mock

import pytest
import torch

from tests.parallel.test_expert import MODEL as EXPERTS
from tests.parallel.tiny import MODEL, batch, each, make_program
from windlass.errors import UserError
from windlass.parallel import build as building
from windlass.parallel.build import check_device, check_tensor_hosts
from windlass.parallel.config import ParallelConfig
from windlass.precision import masters


def names_and_bytes(world, zero, replicate, shard, tied):
    """Names, logical shapes, and the bytes of the parameters that this rank holds."""
    program = make_program(world, zero, replicate, shard, model={**MODEL, "tie_word_embeddings": tied})
    records = program.records()
    local = [getattr(record.tensor, "_local_tensor", record.tensor) for record in records]
    return [(record.name, tuple(record.logical_shape)) for record in records], sum(t.numel() for t in local)


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_one_process_and_shards_a_share(ranks, tied):
    (names, whole) = ranks.run(1, names_and_bytes, 1, 3, 1, 1, tied)[0]
    assert ("lm_head.weight" in dict(names)) == (not tied)
    assert dict(names)["model.embed_tokens.weight"] == (256, 24), "padded to a multiple of 128"
    for layout in ((2, 0, 2, 1), (2, 3, 1, 2), *([(4, 3, 2, 2)] * tied)):
        results = ranks.run(layout[0], names_and_bytes, *layout, tied)
        assert all(result[0] == names for result in results)
        share = sum(result[1] for result in results) / layout[0]
        assert share == whole / layout[3], "every replica holds the model once"


def graphs_of_a_hundred_steps(layout, policy, plan, more=None):
    """(graphs after one step and one evaluation, graphs after 100 steps with other data and 10 evaluations, parameters' names,
    losses of first and last step), compiled; a recompilation after the first two would be an error."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    program = make_program(*layout, policy, plan=plan, compile=True, **(more or {}))
    losses, first = [], 0

    def step(number):
        batches = [batch(2 * number + index) for index in range(2)]
        losses.append(program.run(batches, torch.tensor(16.0 * layout[0])).item())
        with torch.no_grad():
            for record in program.records():
                record.tensor.sub_(record.tensor.grad, alpha=0.05)
                record.tensor.grad = None
        if number % 10 == 0:
            program.evaluate(batches)

    step(0)
    first = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(1, 100):
            step(number)
    return first, counters["stats"]["unique_graphs"], [record.name for record in program.records()], losses


# a graph per kind of recomputation for training, and one for evaluation, which builds no backward; the same of the head's loss
RUNS = {
    "one-fp32": ((1, 3, 1, 1), "fp32", None, 4),
    "ddp-fp32": ((2, 0, 2, 1), "fp32", None, 4),
    "ddp-bf16": ((2, 0, 2, 1), "bf16", None, 4),
    "zero3-fp32": ((2, 3, 1, 2), "fp32", None, 4),
    "zero3-bf16": ((2, 3, 1, 2), "bf16", None, 4),
    "zero3-fp32-mixed": ((2, 3, 1, 2), "fp32", ("full", "selective", "none"), 8),
}


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_a_hundred_steps_and_ten_evaluations_compile_nothing_again(ranks, run):
    layout, *_, expected = RUNS[run]
    names = ranks.run(layout[0], names_and_bytes, *layout, True)[0][0]
    for first, last, compiled_names, losses in ranks.run(
        layout[0], graphs_of_a_hundred_steps, *RUNS[run][:3], timeout_s=400
    ):
        assert first == last == expected
        assert compiled_names == [name for name, _ in names], "compile adds nothing to a name"
        assert len(set(losses)) == 100, "every step saw other data and weights"


@pytest.mark.long
def test_layers_of_experts_share_the_graphs_of_their_first_half(ranks):
    """Without recomputation, and with another kind of it in each layer: selective is one graph more, in training and in
    evaluation each."""
    for plan, graphs in ((None, 4), (("full", "selective", "none"), 6)):
        more = {"model": EXPERTS, "expert": 2}
        for first, last, _, losses in ranks.run(
            2, graphs_of_a_hundred_steps, (2, 3, 1, 2), "fp32", plan, more, timeout_s=400
        ):
            assert first == last == graphs and len(set(losses)) == 100


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"apt install g\+\+"):
        check_device(ParallelConfig(compile=True), "cpu")
    check_device(ParallelConfig(compile=True), "cuda")
    check_device(ParallelConfig(), "cpu")


def test_overlapped_exchanges_are_refused_where_no_rank_reads_another_s_memory():
    with pytest.raises(UserError, match=r"parallel\.async_tp=true on CPU ranks") as caught:
        check_device(ParallelConfig(tp=2, compile=True, async_tp=True), "cpu")
    assert caught.value.change == "remove parallel.async_tp"
    check_device(ParallelConfig(tp=2, compile=True, async_tp=True), "cuda")


def test_overlapped_exchanges_are_refused_between_hosts():
    config = ParallelConfig(tp=2, compile=True, async_tp=True)
    check_tensor_hosts(config, ["a", "a", "b", "b"])
    check_tensor_hosts(ParallelConfig(tp=2), ["a", "b"])
    with pytest.raises(UserError) as caught:
        check_tensor_hosts(config, ["a", "a", "a", "b"])
    assert caught.value.given == "parallel.async_tp=true with parallel.tp=2, and tensor ranks on a and b"
    assert "one host" in caught.value.rule and "divides the ranks of a host" in caught.value.change


def compiled_sums(compiles):
    with (
        mock.patch.object(masters, "COMPILED_FROM", 1),
        mock.patch.object(masters, "compiled_add", return_value=masters.add_to) as asked,
    ):
        make_program(1, policy="bf16", compile=compiles)
    return asked.call_count > 0


def test_masters_of_a_compiled_model_are_added_to_by_a_compiled_kernel(ranks):
    assert ranks.run(1, each, partial(compiled_sums, True), partial(compiled_sums, False)) == [[True, False]]
