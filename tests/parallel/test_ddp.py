"""DDP: every gradient sent once however many micro-batches, and summed, not averaged."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from tests.parallel.tiny import MODEL, Operators, assert_equal, batch, each, gradients, make_program, num_buckets
from windlass.errors import BadLayout
from windlass.precision.sums import summed
from windlass.units import MIB


def count_ddp(micro_batches):
    """All-reduce calls of a step under DDP: of buckets, and the loss's."""
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


def count_overlapped(policy, reduce, bucket_mib):
    """Of each of three steps: how many buckets were sent when each gradient came, and the bytes of each; the gradients' sizes."""
    from windlass.parallel import ddp

    program = make_program(2, 0, 2, 1, policy, model=WIDE, bucket_mib=bucket_mib, precision={"reduce": reduce})
    calls, sent, steps = [], [], []
    for record in program.records():
        read = record.tensor if record.copy is None else record.copy
        read.register_post_accumulate_grad_hook(lambda _: sent.append(len(calls)))
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


BYTES = {"fp32": 4, "bf16": 2}


@pytest.mark.parametrize("bucket_mib", [1, 2, 3, 25])
@pytest.mark.parametrize(
    ("policy", "reduce"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"), ("bf16-pure", "fp32")]
)
def test_buckets_are_sent_while_the_last_backward_runs(ranks, policy, reduce, bucket_mib):
    for steps, sizes in ranks.run(2, count_overlapped, policy, reduce, bucket_mib):
        expected = num_buckets([BYTES[reduce] * size for size in reversed(sizes)], bucket_mib)
        # the embedding comes last, and closes what is open
        assert (expected > 1) == (BYTES[reduce] * sum(sizes[1:]) >= bucket_mib * MIB), expected
        for sent, calls in steps:
            first, last = sent[: len(sizes)], sent[len(sizes) :]
            assert len(last) == len(sizes) and set(first) == {0}, "none before the last micro-batch"
            assert last[-1] == expected == len(calls), "all in backward"
            assert (last[-2] >= 1) == (expected > 1), "the first before the last gradient"
            assert sum(calls) == BYTES[reduce] * sum(sizes)


def gradients_in(policy, world, zero, replicate, shard, batches, steps=1, **settings):
    """{name: gradient} of the last of `steps`, and the names of parameters whose own gradient is left behind."""
    program = make_program(world, zero, replicate, shard, policy, **settings)
    own = batches[2 * program.mesh.batch_rank :][:2] if world > 1 else batches
    for _ in range(steps):
        for record in program.records():
            record.tensor.grad = None
        program.run([batch(one) for one in own], torch.tensor(32.0))
    left = [record.name for record in program.records() if record.copy is not None and record.copy.grad is not None]
    return {record.name: record.tensor.grad for record in program.records()}, left


def on_each_half(policy, **settings):
    """What each of two ranks would have alone: its gradients, of one process."""
    return [partial(gradients_in, policy, 1, 3, 1, 1, some, **settings) for some in ((0, 1), (2, 3))]


@pytest.mark.parametrize("settings", [{}, {"bucket_mib": 0.001}, {"frozen": ("model.layers.0.mlp.up_proj.weight",)}])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-pure"])
def test_gradients_are_each_ranks_sums_added(ranks, policy, settings):
    """To the bit: of two numbers the sum has no order. The second step's too, into the same memory."""
    both = ranks.run(2, partial(gradients_in, policy, 2, 0, 2, 1, (0, 1, 2, 3), 2, **settings))
    frozen = settings.get("frozen", ())
    (((first, _), (second, _)),) = ranks.run(1, each, *on_each_half(policy, frozen=frozen))
    for found, left in both:
        assert found.keys() == first.keys() and left == []
        for name, gradient in found.items():
            if name in frozen:
                assert gradient is first[name] is None
            else:
                assert torch.equal(gradient, first[name] + second[name]), name


@pytest.mark.parametrize("settings", [{}, {"bucket_mib": 0.001}])
def test_masters_whose_gradients_are_in_bf16_fill_buckets_too(ranks, settings):
    """A recipe cannot ask for it; a caller of build_program can."""
    settings = {**settings, "precision": {"gradients": "bf16", "reduce": "bf16"}}
    both = ranks.run(2, partial(gradients_in, "bf16", 2, 0, 2, 1, (0, 1, 2, 3), 2, **settings))
    (((first, _), (second, _)),) = ranks.run(1, each, *on_each_half("bf16", precision={"gradients": "bf16"}))
    for found, left in both:
        assert left == [] and {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
        assert all(torch.equal(found[name], first[name] + second[name]) for name in first)


def late_gradients(policy, **settings):
    """`gradients_in` where a sum is made when it is waited for, and no earlier."""
    from windlass.parallel import ddp

    class Late:
        def __init__(self, *args, **kwargs):
            self.call = partial(send, *args, **kwargs)

        def wait(self):
            self.call().wait()

    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (Late if kwargs.get("async_op") else send)(*args, **kwargs)
    try:
        return gradients_in(policy, 2, 0, 2, 1, (0, 1, 2, 3), **settings)
    finally:
        ddp.dist.all_reduce = send


@pytest.mark.parametrize(("reduce", "tolerance"), [("fp32", 0.0), ("bf16", 2**-7)])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_every_sum_is_waited_for_and_goes_back_to_its_own_bucket(ranks, policy, reduce, tolerance):
    (((first, _), (second, _)),) = ranks.run(1, each, *on_each_half(policy))
    for found, _ in ranks.run(2, partial(late_gradients, policy, bucket_mib=0.001, precision={"reduce": reduce})):
        for name, gradient in found.items():
            exact = first[name] + second[name]
            assert (gradient - exact).abs().max() <= tolerance * exact.abs().max(), name


def test_buckets_are_sent_in_one_order_however_their_gradients_come(monkeypatch):
    from windlass.parallel import ddp

    sent = []
    monkeypatch.setattr(ddp.dist, "all_reduce", lambda sums, group, async_op: sent.append(len(sums)) or mock.Mock())
    sums = ddp.OverlappedSums(None, torch.float32, torch.float32)
    model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)})
    slots = sums.fill(model, 4 / MIB)  # a bucket each
    for order in ("acb", "bac", "cba"):
        for is_last in (False, True):
            sums.before(is_last)
            assert sent == []
            for name in order:
                slots[name].added()
        with pytest.raises(AssertionError, match="more gradients than parameters"):
            slots["c"].added()
        sums.finish()
        assert sent == [1, 2, 3], "the model's end first"
        sent.clear()
    sums.before(True)
    slots["c"].added()
    with pytest.raises(BadLayout, match="2 of 3 buckets are missing a gradient"):
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
    grads = [record.tensor.grad for record in program.records()]
    return [one.untyped_storage().nbytes() == one.nbytes for one in grads], mode.collectives()


def test_one_process_has_no_bucket_and_sends_nothing(ranks):
    ((own, calls),) = ranks.run(1, count_alone)
    assert own and all(own) and calls == {}
