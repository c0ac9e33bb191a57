"""Tensor and sequence parallelism: each cut module against the plain one, what is sent counted to the byte, what is kept."""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._inductor import config as inductor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.tiny import MODEL, each, full, make_program
from windlass.model.attention.layout import AttentionLayout
from windlass.optim.rounding import numbering_of
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.tensor import overlap_exchanges
from windlass.ranks.owned_part import local_part, owned_ranges

BLOCKS, HIDDEN, HEAD_DIM, WIDTH, TOKENS, ROWS = 3, 24, 8, 40, 16, 2
HEADED = MODEL | {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = [2, pytest.param(4, marks=pytest.mark.long)]
GPT2 = {"family": "gpt2", "vocab_size": 150, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def batch(seed):
    ids = torch.randint(0, 150, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[seed % ROWS, : 3 + seed] = -100
    return {"input_ids": ids[:, :-1], "targets": targets}


def gradients(world, shard=1, replicate=1, zero=3, model=HEADED, frozen=(), policy="fp64", **parallel):
    """As tiny.gradients, for batches that tp divides."""
    program = make_program(world, zero, replicate, shard, policy, model, frozen=frozen, **parallel)
    first = program.mesh.batch_rank
    batches = [batch(index) for index in range(first, 4, program.mesh.layout.batch_ranks)]
    loss = program.run(batches, torch.tensor(40.0))
    graded = [record for record in program.records() if record.tensor.grad is not None]
    return loss.item(), {record.name: full(record.tensor.grad) for record in graded}


def assert_equal(one, two, tolerance):
    """The bias of keys moves no attention weight: its gradient is noise, so the model's largest counts too."""
    assert abs(one[0] - two[0]) <= tolerance
    assert one[1].keys() == two[1].keys()
    scale = 1e-3 * max(gradient.abs().max() for gradient in one[1].values())
    for name, gradient in one[1].items():
        assert (gradient - two[1][name]).abs().max() <= tolerance * max(gradient.abs().max(), scale), name


def gradients_of(settings):
    return gradients(torch.distributed.get_world_size(), **settings)


def test_frozen_parameters_get_no_gradient_and_the_others_theirs(ranks):
    frozen = (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    )
    model = HEADED | {"tie_word_embeddings": False}
    (plain,) = ranks.run(1, gradients_of, {"model": model, "frozen": frozen})
    for cut in ranks.run(2, gradients_of, {"model": model, "frozen": frozen, "tp": 2}):
        assert_equal(plain, cut, 1e-12)


def parts_held():
    program = make_program(2, model=HEADED, tp=2)
    return {
        record.name: (tuple(record.logical_shape), record.tensor.to_local().numel()) for record in program.records()
    }


def test_each_rank_holds_half_of_every_matrix_and_all_of_every_norm(ranks):
    for held in ranks.run(2, parts_held):
        for name, (shape, elements) in held.items():
            assert elements == torch.Size(shape).numel() // (1 if "norm" in name else 2), name


def overlapped(rows, is_async):
    """Gradients of one compiled step, and how often a block's graphs hold each exchange. torch's operators for GPUs are here in
    their plain form: the same exchange, the same products, nothing in pieces."""
    from torch._inductor.fx_passes import post_grad  # it warns, and tests end at warnings where they are collected

    torch._dynamo.reset()  # a graph of the other kind would serve this one
    exchanges, rewrite = Counter(), post_grad.micro_pipeline_tp_pass
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")

    def counted(graph):
        rewrite(graph)
        names = [str(node.target) for node in graph.nodes]
        exchanges.update(name.split(".")[1] for name in names if name.startswith("symm_mem"))
        exchanges.update(name.split(".")[1] for name in names if name.startswith("_c10d") and "wait" not in name)

    with (
        torch.compiler.config.patch(
            force_disable_caches=True, cache_key_tag=""
        ),  # a cached graph is not made, or counted
        inductor.patch(_micro_pipeline_tp=False),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(symmetric, "enable_symm_mem_for_group") as enable,
        mock.patch.object(post_grad, "micro_pipeline_tp_pass", counted),
        symmetric._test_mode(),
    ):
        program = make_program(2, policy="fp64", model=HEADED, tp=2, zero=1, compile=True, async_tp=is_async)
        batches = [{name: value[:rows] for name, value in batch(index).items()} for index in range(2)]
        loss = program.run(batches, torch.tensor(40.0)).item()
        tag = torch.compiler.config.cache_key_tag
    library._destroy()
    found = {record.name: full(record.tensor.grad) for record in program.records()}
    return (loss, found), dict(exchanges), (enable.call_count, tag)


FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
EXCHANGES = {  # rows -> of a block, forward and backward
    1: {"all_gather_into_tensor": 4, FUSED_SCATTER: 2, "reduce_scatter_tensor": 2},
    2: {FUSED_GATHER: 4, FUSED_SCATTER: 2, "reduce_scatter_tensor": 2},
}


@pytest.mark.parametrize("rows", EXCHANGES)
def test_overlapped_exchanges_train_the_same_and_are_as_many_as_the_docstring_says(ranks, rows):
    calls = [partial(overlapped, rows, is_async) for is_async in (False, True)]
    for (plain, _, untouched), (cut, exchanges, touched) in ranks.run(2, each, *calls, timeout_s=400):
        assert_equal(plain, cut, 1e-12)
        assert exchanges == EXCHANGES[rows]
        assert untouched == (0, "") and touched == (1, "async_tp")


def settings_after(*asked):
    """On one of two ranks: the private setting and the cache's tag after programs that ask for async_tp, or not."""
    mesh = make_mesh(ParallelConfig(tp=2).layout(2), "cpu").dense["tp"]
    with (
        torch.compiler.config.patch(cache_key_tag="of a user"),
        inductor.patch(_micro_pipeline_tp=False),
        mock.patch.object(symmetric, "enable_symm_mem_for_group"),
    ):
        for is_asked in asked:
            overlap_exchanges(mesh, is_asked)
        return inductor._micro_pipeline_tp, torch.compiler.config.cache_key_tag


def test_a_program_without_it_undoes_what_one_before_it_set(ranks):
    calls = (partial(settings_after, *asked) for asked in ((False,), (True,), (True, False)))
    assert ranks.run(2, each, *calls) == [[(False, "of a user"), (True, "async_tp"), (False, "")]] * 2


class Sent(TorchDispatchMode):
    """Calls of collectives and the bytes that go into them, over tp: FSDP2's own, over one rank here, are c10d::allgather_base
    and reduce_scatter_base and are left out."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._schema.name.partition("::")
        if (space == "_c10d_functional" and not name.startswith(("wait", "_wrap"))) or name == "allreduce_":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.calls[f"{space}::{name}"] += 1
            self.bytes[f"{space}::{name}"] += sum(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


def sent_per_step(tp, micro_batches, model, settings):
    program = make_program(tp, policy="fp64", model=model, tp=tp, **settings)
    batches = [batch(index) for index in range(micro_batches)]
    program.run(batches, torch.tensor(40.0))
    program.model.zero_grad()
    with Sent() as sent:
        program.run(batches, torch.tensor(40.0))
    return dict(sent.calls), dict(sent.bytes)


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), pytest.param(4, 4, marks=pytest.mark.long), (4, 2)])
def test_what_is_sent_is_what_the_docstring_says(ranks, tp, kv_heads):
    model = HEADED | {"num_key_value_heads": kv_heads}
    whole = ROWS * TOKENS * HIDDEN * 8  # n, bytes
    norms = 4 * BLOCKS + 1
    elements = BLOCKS * (2 * HIDDEN + 2 * HEAD_DIM) + HIDDEN
    if kv_heads < tp:  # whole matrices of keys and values
        norms, elements = norms + 2 * BLOCKS, elements + 2 * BLOCKS * kv_heads * HEAD_DIM * HIDDEN
    cases = [(1, "none"), (3, "none"), (1, "full"), (1, "selective")]
    calls = [partial(sent_per_step, tp, micro, model, {"recompute": recompute}) for micro, recompute in cases]
    for found in ranks.run(tp, each, *calls):
        for (micro_batches, recompute), (calls, sizes) in zip(cases, found, strict=True):
            gathers, scatters = 4 * BLOCKS + 2, 4 * BLOCKS + 2
            gathers += {"none": 0, "full": 2, "selective": 2}[recompute] * BLOCKS
            scatters += {"none": 0, "full": 1, "selective": 0}[recompute] * BLOCKS
            assert calls == {
                "_c10d_functional::all_gather_into_tensor": micro_batches * gathers,
                "_c10d_functional::reduce_scatter_tensor": micro_batches * scatters,
                "_c10d_functional::all_reduce": micro_batches * norms,
                "c10d::allreduce_": micro_batches * 2,
            }
            assert sizes == {
                "_c10d_functional::all_gather_into_tensor": micro_batches * gathers * whole // tp,
                "_c10d_functional::reduce_scatter_tensor": micro_batches * scatters * whole,
                "_c10d_functional::all_reduce": micro_batches * elements * 8,
                "c10d::allreduce_": micro_batches * 3 * ROWS * TOKENS * 8,
            }


def sent_beside_ddp(replicate, micro_batches):
    """Over tp: calls and bytes; over replicas: elements of each message."""
    from windlass.parallel import ddp

    program = make_program(2 * replicate, zero=0, replicate=replicate, policy="fp64", model=HEADED, tp=2)
    batches, flat, send = [batch(index) for index in range(micro_batches)], [], ddp.dist.all_reduce

    def count(tensor, *args, **kwargs):
        if program.mesh.loss_group in (*args, *kwargs.values()):
            flat.append(tensor.numel())
        return send(tensor, *args, **kwargs)

    with mock.patch.object(ddp.dist, "all_reduce", count), Sent() as sent:
        program.run(batches, torch.tensor(40.0))
    held = sum(record.tensor.to_local().numel() for record in program.records())
    over_tp = "_c10d_functional::all_reduce"
    return sent.calls[over_tp], sent.bytes[over_tp], flat, held


@pytest.mark.parametrize("replicate", [1, 2])
def test_beside_ddp_norms_are_summed_once_per_step_and_replicas_send_their_parts(ranks, replicate):
    norms, elements = 4 * BLOCKS + 1, BLOCKS * (2 * HIDDEN + 2 * HEAD_DIM) + HIDDEN
    for found in ranks.run(2 * replicate, each, *(partial(sent_beside_ddp, replicate, count) for count in (1, 3))):
        for calls, size, flat, held in found:
            assert (calls, size) == (norms, elements * 8), "however many micro-batches"
            assert flat == ([held, 1] if replicate > 1 else []), "one bucket of all that this rank holds, and the loss"


def kept_bytes(tp, recompute):
    """Bytes that autograd keeps of one block's forward, parameters aside."""
    program = make_program(tp, policy="fp64", model=HEADED | {"num_key_value_heads": 4}, tp=tp, recompute=recompute)
    block = program.model.blocks[0]
    if isinstance(block, FSDPModule):
        block.unshard()
    own, kept = {local_part(parameter).untyped_storage().data_ptr() for parameter in block.parameters()}, {}

    def pack(tensor):
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    stream = torch.randn(ROWS, TOKENS // tp, HIDDEN, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(stream, None, AttentionLayout())
    del out
    return sum(kept.values())


@pytest.mark.parametrize("tp", SIZES)
def test_a_block_keeps_one_tpth_but_for_its_two_gathered_inputs(ranks, tp):
    (whole,) = ranks.run(1, kept_bytes, 1, "none")
    gathered = 2 * ROWS * TOKENS * HIDDEN * 8
    assert set(ranks.run(tp, kept_bytes, tp, "none")) == {(whole - gathered) // tp + gathered}


@pytest.mark.parametrize("tp", SIZES)
def test_a_recomputed_block_keeps_one_tpth(ranks, tp):
    (whole,) = ranks.run(1, kept_bytes, 1, "full")
    assert set(ranks.run(tp, kept_bytes, tp, "full")) == {whole // tp}


def places():
    program = make_program(4, model=HEADED, tp=2, shard=2)
    wrong = []
    for record in program.records():
        grid = torch.arange(record.tensor.numel()).view(record.logical_shape)
        for dim, part in enumerate(owned_ranges(record.tensor)):
            grid = grid.narrow(dim, part.start, len(part))
        numbers = numbering_of(record.tensor).numbers(0, grid.numel(), torch.device("cpu"))
        if not torch.equal(numbers, grid.flatten().int()):
            wrong.append(record.name)
    return wrong


def test_stochastic_rounding_knows_every_element_by_its_number_in_the_whole_tensor(ranks):
    assert ranks.run(4, places) == [[]] * 4
