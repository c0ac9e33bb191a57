"""DDP: every gradient sent once however many micro-batches, and summed, not averaged."""

from functools import partial
from unittest import mock

import pytest
import torch

from tests.parallel.tiny import MODEL, Operators, assert_equal, batch, each, gradients, make_program, num_buckets
from windlass.precision.sums import summed


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
            assert last[-1] == expected == len(calls), "all in backward"
            assert (last[-2] >= 1) == (expected > 1), "the first before the last gradient"
            assert sum(calls) == (4 if in_fp32 else 2) * sum(sizes)


def gradients_in_bf16(world, zero, replicate, shard, batches, steps=1, **settings):
    """{name: gradient} of the last of `steps`, and the names of parameters whose own gradient is left behind."""
    program = make_program(world, zero, replicate, shard, "bf16", **settings)
    own = batches[2 * program.mesh.batch_rank :][:2] if world > 1 else batches
    for _ in range(steps):
        for record in program.records():
            record.tensor.grad = None
        program.run([batch(one) for one in own], torch.tensor(32.0))
    left = [record.name for record in program.records() if record.copy.grad is not None]
    return {record.name: record.tensor.grad for record in program.records()}, left


def on_each_half(**settings):
    """What each of two ranks would have alone: its gradients, of one process."""
    return [partial(gradients_in_bf16, 1, 3, 1, 1, some, **settings) for some in ((0, 1), (2, 3))]


@pytest.mark.parametrize("settings", [{}, {"bucket_mib": 0.001}, {"frozen": ("model.layers.0.mlp.up_proj.weight",)}])
def test_gradients_of_masters_are_each_ranks_fp32_sums_added(ranks, settings):
    """To the bit: of two numbers the sum has no order. The second step's too, into the same memory."""
    both = ranks.run(2, partial(gradients_in_bf16, 2, 0, 2, 1, (0, 1, 2, 3), 2, **settings))
    frozen = settings.get("frozen", ())
    (((first, _), (second, _)),) = ranks.run(1, each, *on_each_half(frozen=frozen))
    for found, left in both:
        assert found.keys() == first.keys() and left == []
        for name, gradient in found.items():
            if name in frozen:
                assert gradient is first[name] is None
            else:
                assert torch.equal(gradient, first[name] + second[name]), name


def late_gradients(**settings):
    """`gradients_in_bf16` where a sum is made when it is waited for, and no earlier."""
    from windlass.parallel import ddp

    class Late:
        def __init__(self, *args, **kwargs):
            self.call = partial(send, *args, **kwargs)

        def wait(self):
            self.call().wait()

    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (Late if kwargs.get("async_op") else send)(*args, **kwargs)
    try:
        return gradients_in_bf16(2, 0, 2, 1, (0, 1, 2, 3), **settings)
    finally:
        ddp.dist.all_reduce = send


@pytest.mark.parametrize(("reduce", "tolerance"), [("fp32", 0.0), ("bf16", 2**-7)])
def test_every_sum_is_waited_for_and_goes_back_to_its_own_bucket(ranks, reduce, tolerance):
    (((first, _), (second, _)),) = ranks.run(1, each, *on_each_half())
    for found, _ in ranks.run(2, partial(late_gradients, bucket_mib=0.001, precision={"reduce": reduce})):
        for name, gradient in found.items():
            exact = first[name] + second[name]
            assert (gradient - exact).abs().max() <= tolerance * exact.abs().max(), name


def test_buckets_are_sent_in_one_order_however_their_gradients_come(monkeypatch):
    from windlass.parallel import ddp

    sent = []
    monkeypatch.setattr(ddp.dist, "all_reduce", lambda sums, group, async_op: sent.append(len(sums)) or mock.Mock())
    sums = ddp.OverlappedSums(None, torch.float32)
    places = sums.fill({f"w{size}": torch.zeros(size) for size in (3, 2, 1)}, 4 / (1 << 20))  # a bucket each
    for order in (("w3", "w1", "w2"), ("w2", "w3", "w1"), ("w1", "w2", "w3")):
        for is_last in (False, True):
            sums.before(is_last)
            assert sent == []
            for name in order:
                places[name].added()
        with pytest.raises(AssertionError, match="more gradients than parameters"):
            places["w1"].added()
        sums.finish()
        assert sent == [1, 2, 3], "the model's end first"
        sent.clear()
    sums.before(True)
    places["w1"].added()
    with pytest.raises(AssertionError, match="a trained parameter got no gradient"):
        sums.finish()
    with pytest.raises(AssertionError, match="the step before did not finish"):
        sums.before(True)


def products_that_add():
    """How many there are of two replicas, on a device whose products can."""
    from windlass.parallel import build

    with mock.patch.object(build, "sums_in_products", lambda *_: True):
        program = make_program(2, 0, 2, 1, "bf16")
    return len(summed(program._linears))


def test_beside_replicas_no_product_adds_to_a_sum(ranks):
    """Its bucket would wait for it: what a product adds is added without a word."""
    assert ranks.run(2, products_that_add) == [0, 0]


def count_alone():
    program = make_program(1, 0, 1, 1)
    with Operators() as mode:
        program.run([batch(), batch()], torch.tensor(16.0))
    return program.caller is program.model, mode.collectives()


def test_one_process_is_not_wrapped_and_sends_nothing(ranks):
    assert ranks.run(1, count_alone) == [(True, {})]
