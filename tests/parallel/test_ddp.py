"""DDP: every gradient sent once however many micro-batches, and summed, not averaged."""

from functools import partial

import pytest
import torch

from tests.parallel.tiny import MODEL, Operators, assert_equal, batch, gradients, make_program, num_buckets


def count_ddp(micro_batches):
    """All-reduce calls of a step under DDP: through the hook, and with the loss's."""
    from windlass.parallel import ddp

    program = make_program(2, 0, 2, 1)
    calls = []
    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), send(*args, **kwargs))[1]
    try:
        count = torch.tensor(8.0 * micro_batches * 2)
        for _ in range(2):
            calls.clear()
            program.run([batch(i) for i in range(micro_batches)], count)
    finally:
        ddp.dist.all_reduce = send
    return calls, sum(record.tensor.numel() for record in program.records())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_sends_each_gradient_once_however_many_micro_batches(ranks, micro_batches):
    for calls, parameters in ranks.run(2, count_ddp, micro_batches):
        assert sum(calls) == parameters + 1, "every gradient once, and the loss"
        assert len(calls) == 1 + 1, "the model fits one bucket of 25 MiB"


WIDE = {**MODEL, "hidden_size": 192, "intermediate_size": 512, "vocab_size": 1000}  # 6.6 MB of fp32 gradients


def count_buckets(bucket_mib):
    """All-reduces of the first, second and third step, and the bytes of the gradients in the order in which they arrive."""
    from windlass.parallel import ddp

    program = make_program(2, 0, 2, 1, model=WIDE, bucket_mib=bucket_mib)
    calls, counts, arrived = [], [], []
    for record in program.records():
        record.tensor.register_post_accumulate_grad_hook(lambda tensor: arrived.append(tensor.numel() * 4))
    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), send(*args, **kwargs))[1]
    try:
        for _ in range(3):
            calls.clear()
            arrived.clear()
            program.run([batch(1), batch(2)], torch.tensor(32.0))
            counts.append(len(calls) - 1)  # the loss's is no bucket
    finally:
        ddp.dist.all_reduce = send
    return counts, list(arrived)


@pytest.mark.parametrize("bucket_mib", [1, 2, 3, 25])
def test_as_many_all_reduces_as_buckets(ranks, bucket_mib):
    for counts, arrived in ranks.run(2, count_buckets, bucket_mib):
        arrived = arrived[-len(arrived) // 2 :]  # of the last micro-batch
        expected = num_buckets(arrived, bucket_mib)
        assert counts == [1, expected, expected], "the first step sends all as one, and learns the order"
        assert (expected > 1) == (bucket_mib < 25), expected


def test_num_buckets_closes_a_bucket_by_what_fills_it():
    mib = 1 << 20
    assert num_buckets([], 25) == 0
    assert num_buckets([mib // 2, mib // 2, mib, mib, mib], 2) == 2
    assert num_buckets([40 * mib, mib], 25) == 2 == num_buckets([mib // 2, mib // 2], 0.5), (
        "a bucket is closed after what filled it"
    )
    assert num_buckets([24 * mib, mib - 1, mib, 3 * mib], 25) == 2


def plain_gradients():
    """One process over the same four micro-batches as two ranks of two."""
    program = make_program(1, 0, 1, 1, "fp64")
    loss = program.run([batch(i) for i in range(4)], torch.tensor(32.0))
    return loss.item(), {record.name: record.tensor.grad for record in program.records()}


def test_gradients_are_the_sum_over_ranks(ranks):
    assert_equal(ranks.run(1, plain_gradients)[0], ranks.run(2, gradients, 2, 0, 2, 1)[0], 1e-12)


def count_overlapped(bucket_mib, in_fp32):
    """In bf16, of each of three steps: how many buckets were sent when each gradient came, and how many at the end."""
    from windlass.parallel import ddp

    program = make_program(
        2, 0, 2, 1, "bf16", model=WIDE, bucket_mib=bucket_mib, precision={"reduce": "fp32" if in_fp32 else "bf16"}
    )
    calls, sent, steps = [], [], []
    for record in program.records():
        record.copy.register_post_accumulate_grad_hook(lambda _: sent.append(len(calls)))
    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].nbytes), send(*args, **kwargs))[1]
    try:
        for _ in range(3):
            calls.clear()
            sent.clear()
            program.run([batch(1), batch(2)], torch.tensor(32.0))
            steps.append((list(sent), calls[:-1]))  # the loss's is no bucket
    finally:
        ddp.dist.all_reduce = send
    return steps, [record.tensor.numel() for record in program.records()]


@pytest.mark.parametrize(("bucket_mib", "in_fp32"), [(1, True), (2, False), (3, True), (25, False)])
def test_buckets_of_masters_are_sent_while_the_last_backward_runs(ranks, bucket_mib, in_fp32):
    for steps, sizes in ranks.run(2, count_overlapped, bucket_mib, in_fp32):
        expected = num_buckets([4 * size for size in reversed(sizes)], bucket_mib)
        assert (expected > 1) == (bucket_mib < 25), expected
        for sent, calls in steps:
            first, last = sent[: len(sizes)], sent[len(sizes) :]
            assert len(last) == len(sizes) and set(first) == {0}, "none before the last micro-batch"
            assert last == sorted(last) and last[-1] == expected == len(calls), "all in backward"
            assert (last[-2] >= 1) == (expected > 1), "the first before the last gradient"
            assert sum(calls) == (4 if in_fp32 else 2) * sum(sizes)


def gradients_in_bf16(world, zero, replicate, shard, batches, steps=1, **settings):
    """{name: gradient} of the last of `steps`, and of what is frozen its copy's."""
    program = make_program(world, zero, replicate, shard, "bf16", **settings)
    own = batches[2 * program.mesh.batch_rank :][:2] if world > 1 else batches
    for _ in range(steps):
        for record in program.records():
            record.tensor.grad = None
        program.run([batch(one) for one in own], torch.tensor(32.0))
    return {record.name: record.tensor.grad for record in program.records() if record.tensor.requires_grad} | {
        record.name: None for record in program.records() if not record.tensor.requires_grad
    }


@pytest.mark.parametrize("settings", [{}, {"bucket_mib": 0.001}, {"frozen": ("model.layers.0.mlp.up_proj.weight",)}])
def test_gradients_of_masters_are_each_ranks_fp32_sums_added(ranks, settings):
    """To the bit: of two numbers the sum has no order. The second step's too, into the same memory."""
    both = ranks.run(2, partial(gradients_in_bf16, 2, 0, 2, 1, (0, 1, 2, 3), 2, **settings))
    alone = {key: value for key, value in settings.items() if key == "frozen"}
    first, second = (
        ranks.run(1, partial(gradients_in_bf16, 1, 3, 1, 1, some, **alone))[0] for some in ((0, 1), (2, 3))
    )
    for found in both:
        assert found.keys() == first.keys()
        for name, gradient in found.items():
            if gradient is None:
                assert first[name] is None and name in settings["frozen"]
            else:
                assert torch.equal(gradient, first[name] + second[name]), name


def in_pieces():
    """What finish says where a trained parameter got no gradient: another rank would wait for its bucket."""
    from windlass.parallel.ddp import overlapped_sums

    program = make_program(2, 0, 2, 1, "bf16")
    sums = overlapped_sums(program.model, program.mesh, 25, torch.float32, torch.float32)
    sums.before(True)
    with pytest.raises(AssertionError, match="a trained parameter got no gradient"):
        sums.finish()
    return sorted(sums.places) == sorted(name for name, _ in program.model.named_parameters())


def test_a_bucket_that_waits_for_a_gradient_is_no_sum(ranks):
    assert ranks.run(2, in_pieces) == [True, True]


def count_alone():
    program = make_program(1, 0, 1, 1)
    with Operators() as mode:
        program.run([batch(), batch()], torch.tensor(16.0))
    return program.caller is program.model, mode.collectives()


def test_one_process_is_not_wrapped_and_sends_nothing(ranks):
    assert ranks.run(1, count_alone) == [(True, {})]
