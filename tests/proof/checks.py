"""What a cell of the matrix is held to: each check trains one layout and compares it with one process.

exact     every number of torch and transformers: fp64 to 1e-10, fp32 to 1e-5
masks     with dropout, every number of our own decoder on one process, mask for mask (tests/model/test_dropout.py holds that
          decoder against transformers with the same masks)
padded    exact, whatever the padded rows of the vocabulary hold (157 entries in 256 rows)
near      16 bits: within 3e-3 of fp32's loss and 3e-2 of its norm
policy    16 bits: near fp32 by the policy's own tolerance, nearer to one process of the same policy (POLICIES)
"""

import math
from dataclasses import dataclass, replace
from unittest import mock

import torch

from tests import cases
from tests.cases import Layout
from tests.proof.matrix import References, groups_in, layout_of, run
from windlass.adapters.config import AdapterConfig
from windlass.model.config import ModelConfig
from windlass.model.lora.adapter import adapter_of, frozen_base
from windlass.model.open_config import architecture_of
from windlass.model.transformer import Decoder
from windlass.parallel.build import store
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.ranks.owned_part import local_part, owned_ranges

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
FP32, BF16 = "torch.float32", "torch.bfloat16"
TIED = "model.embed_tokens.weight"
GARBAGE = 3.0
PADDED = 256
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def apart(ours, theirs):
    """The largest relative difference of a step."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def joined(results, what):
    """The tensors of all stages."""
    return {name: tensor for result in results for name, tensor in result[what].items()}


def assert_one_number(results):
    for result in results:
        for name in ("losses", "norms", "evaluations"):
            assert result[name] == results[0][name], f"{name} are the same numbers on every rank"


def exact(references: References, ranks, model: str, words: str) -> list[dict]:
    """Losses, norms and routers' figures of every rank, every gradient of the first step, in fp64 every weight after the last."""
    case = layout_of(model, words)
    results = run(references, ranks, model, case)
    assert_exact(references, model, words, results)
    if case.adapter:
        assert_untouched(references.directory(model), case, joined(results, "base"))
    return results


def assert_untouched(directory, case, base):
    """An adapter's frozen base is what its files hold, bit for bit; matrices in NF4 as they quantise as a whole."""
    architecture = architecture_of(ModelConfig.model_validate({"from": str(directory)}))
    adapter = adapter_of(AdapterConfig(kind="lora", **dict(case.adapter)), architecture)
    decoder = Decoder(architecture, adapter=adapter)
    store(decoder, precision_of(PrecisionConfig(policy=case.policy)), frozen_base(architecture, adapter))
    expected = dict(decoder.named_parameters())
    cases.load_weights(directory, architecture, {name: expected[name] for name in base})
    assert base.keys() == frozen_base(architecture, adapter)
    for name, tensor in base.items():
        assert torch.equal(tensor, expected[name]), name


def assert_exact(references, model, words, results):
    case, trace = layout_of(model, words), references.of(model, words)
    policy, tolerance = case.policy, TOLERANCE[case.policy]
    for result in results:
        for name in ("losses", "norms"):
            worst = apart(result[name], getattr(trace, name))
            assert worst <= tolerance, (name, worst, result[name], getattr(trace, name))
        for figures, expected in zip(result["figures"], trace.figures or [{}] * case.steps, strict=True):
            assert figures.keys() == expected.keys()
            for name, value in expected.items():
                off = (torch.tensor(figures[name], dtype=torch.float64) - value).abs().max()
                assert off <= tolerance * value.abs().max(), name
    assert_one_number(results)
    # AdamW divides a small gradient by its own size, so that fp32 noise of the gradients is no noise of the weights
    for name in ("gradients", "weights") if policy == "fp64" else ("gradients",):
        cases.assert_same_tensors(joined(results, name), getattr(trace, name), references.directory(model), tolerance)
    if policy == "fp32" and groups_in(model, words):  # a rate of its own moves it by far more than that noise
        for name, weight in trace.weights.items():
            assert (results[0]["weights"][name][: len(weight)] - weight).abs().max() <= 10 * tolerance, name


def masks(references: References, ranks, model: str, words: str) -> None:
    """Losses, norms and evaluations, and with fp64 gradients and weights. Nobody draws, and evaluation drops nothing."""
    case = layout_of(model, words)
    results, tolerance = run(references, ranks, model, case, train_and_look), TOLERANCE[case.policy]
    alike = dict(policy=case.policy, packed=case.packed, length=case.length, steps=case.steps, adapter=case.adapter)
    alike |= {"objective": case.objective}
    expected = references.alone(model, Layout(1, 3, 1, 1, 8, **alike))
    for result in results:
        for name in ("losses", "norms", "evaluations"):
            worst = apart(result[name], expected[name])
            assert worst <= tolerance, (name, worst, result[name], expected[name])
        assert not result["drawn"], "nobody draws from the global generator"
    for name in ("gradients", "weights") if case.policy == "fp64" else ():
        held = joined(results, name)
        for parameter, value in expected[name].items():
            assert (held[parameter] - value).abs().max() <= tolerance, (name, parameter)
    if case.objective:  # its scores would be this decoder's too
        return
    last = clean_loss(references.directory(model), joined(results, "base") | joined(results, "weights"), case)
    assert abs(results[0]["evaluations"][-1] - last) <= tolerance, "evaluation drops nothing"


def train_and_look(directory, case):
    """On a rank: train_layout, and whether it drew from the global generator."""
    before = torch.get_rng_state()
    result = cases.train_layout(directory, case)
    return {**result, "drawn": not torch.equal(before, torch.get_rng_state())}


def clean_loss(directory, weights, case):
    """Of the last batch, by the plain decoder with these weights and without any key."""
    architecture = architecture_of(ModelConfig.model_validate({"from": str(directory)}))
    adapter = adapter_of(AdapterConfig(kind="lora", **dict(case.adapter)), architecture) if case.adapter else None
    decoder = Decoder(architecture, adapter=adapter).double().eval()
    decoder.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    decoder.tie()
    ids, targets = cases.global_batches(case.length)[case.steps - 1]
    borders = cases.documents(case.steps - 1, case.length) if case.packed else None
    with torch.no_grad():
        return (decoder(ids, targets, documents=borders) / (targets != -100).sum()).item()


def padded(references: References, ranks, model: str, words: str, garbage: float = GARBAGE) -> None:
    """Padded rows get no probability and no gradient: they decay, and all else is as if they were not there."""
    case, trace = layout_of(model, words), references.of(model, words)
    decay = math.prod(1 - rate * cases.OPTIM.weight_decay for rate in cases.RATES[: case.steps])
    for result in run(references, ranks, model, case, train_with_garbage, garbage):
        for name in ("losses", "norms"):
            assert apart(result[name], getattr(trace, name)) <= TOLERANCE[case.policy], name
        for name in result["weights"].keys() & set(TABLES):
            assert result["weights"][name].shape[0] == PADDED
            rows = result["weights"][name][cases.VOCABULARY :]
            assert (rows - garbage * decay).abs().max() <= TOLERANCE[case.policy], "decayed, and moved by no gradient"


def train_with_garbage(garbage, directory, case):
    """On a rank: the padded rows hold `garbage` when training starts, in whatever part of them the rank has."""
    load = cases.load_weights

    def load_and_spoil(source, architecture, named):
        load(source, architecture, named)
        for name in named.keys() & set(TABLES):
            rows = owned_ranges(named[name])[0]
            local_part(named[name])[max(0, cases.VOCABULARY - rows.start) :] = garbage

    with mock.patch.object(cases, "load_weights", load_and_spoil):
        return cases.train_layout(directory, case)


def near(references: References, ranks, model: str, words: str) -> None:
    """With experts the first step only: later ones may route a token elsewhere, where two experts are near a tie."""
    case, trace = layout_of(model, words), references.of(model, words, "fp32")
    steps = 1 if model.startswith(("qwen3_moe", "mixtral")) else case.steps
    for result in run(references, ranks, model, case):
        for ours, theirs in zip(result["losses"][:steps], trace.losses[:steps], strict=True):
            assert abs(ours - theirs) <= 3e-3 * max(1.0, theirs)
        for ours, theirs in zip(result["norms"][:steps], trace.norms[:steps], strict=True):
            assert abs(ours - theirs) <= 3e-2 * theirs
        if case.policy == "bf16-pure":
            assert result["dtypes"]["weights"] == {BF16} == result["dtypes"]["moments"]


@dataclass(frozen=True)
class Policy:
    """What a policy may be off by, and what is stored in which dtype."""

    loss: float
    norm: float
    apart: float
    """From one process of the same policy, in loss and norm."""
    gradients: float = 1e-6
    """From the same, of the first step."""
    equal: float = 0.0
    """The share of the moments' elements that are bit-equal to one process's. Stochastic rounding with the same noise keeps it
    near 1 where gradients agree to 1e-7, and at 0.2 where they agree to 2^-8."""
    weights: str = FP32
    moments: str = FP32


# Unit roundoff u is 2^-8 for bf16 and 2^-11 for fp16, so fp16's tolerances are an eighth of bf16's. What is summed over ranks and
# kept in fp32 agrees with one process of the same policy as fp32 does: the first step's gradients to 1e-6 of a tensor's largest
# (1.2e-7 seen; a sum in bf16, which hides in the first comparison, is 3.6e-3). From the second step on a weight that an ulp moved
# may be cast to the other side: 0 on most CPUs, u/19 of a norm on one that multiplies fp16 itself; u/4 is allowed.
NARROW = Policy(3e-3, 3e-2, 2**-8, 2**-6, 0.1, BF16, BF16)
POLICIES = {
    "bf16": Policy(3e-3, 3e-2, 2**-8 / 4),
    "fp16": Policy(4e-4, 4e-3, 2**-11 / 4),
    # moments off by u, at random, move three steps' weights by u x rate: 1e-5 of a weight
    "fp32 states-bf16": Policy(1e-5, 1e-4, 1e-5, equal=0.95, moments=BF16),
    "bf16 states-bf16": Policy(3e-3, 3e-2, 2**-8 / 4, equal=0.95, moments=BF16),
    "fp16 states-bf16": Policy(4e-4, 4e-3, 2**-11 / 4, equal=0.95, moments=BF16),
    # gradients are stored in bf16 after every micro-batch, so layouts with other micro-batches differ by u = 2^-8, and sums of
    # several such gradients, where they cancel, by some u (9.9e-3 seen)
    "bf16-pure": NARROW,
    "bf16-pure nearest": NARROW,
    "bf16-pure products-fp32": NARROW,
    "bf16 reduce-bf16": Policy(3e-3, 3e-2, 3e-3, 2**-6),
    # a micro-batch's loss is rounded by u = 3.9e-3, and so is the divisor of its gradient
    "bf16 output-bf16": Policy(4e-3, 3e-2, 4e-3),
    # factors are rounded by 2^-4 (e4m3) and 2^-3 (e5m2), and products average that
    "fp8": Policy(6e-3, 5e-2, 2**-8 / 4),
    "fp8 rowwise": Policy(6e-3, 5e-2, 2**-8 / 4),
}


def furthest(ours, theirs):
    """Of all elements, relative to the largest of its tensor, or to a thousandth of the model's largest."""
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in theirs.values())
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max()) / max(float(theirs[n].abs().max()), floor) for n in theirs)


def equal_share(one, two):
    same = sum(int((one[name] == two[name]).sum()) for name in two)
    return same / sum(value.numel() for value in two.values())


def policy(references: References, ranks, model: str, words: str) -> None:
    """One process has micro-batches of as many rows: a weight's gradient is rounded once per micro-batch."""
    case, trace = layout_of(model, words), references.of(model, words, "fp32")
    row = POLICIES[next(name for name in sorted(POLICIES, key=len, reverse=True) if words.endswith(name))]
    results = run(references, ranks, model, case)
    cut = dict(world=1, zero=3, replicate=1, shard=1, recompute="none", sharding=())
    single = references.alone(model, replace(case, **cut))
    for result in results:
        off = {"loss": apart(result["losses"], trace.losses), "norm": apart(result["norms"], trace.norms)}
        assert off["loss"] <= row.loss and off["norm"] <= row.norm, ("against fp32's reference", off)
        assert result["dtypes"] == {"weights": {row.weights}, "gradients": {row.weights}, "moments": {row.moments}}
    ours, theirs = joined(results, "gradients"), dict(single["gradients"])
    if (
        "pp" in dict(case.sharding) and "tied" in model
    ):  # a stage adds the tied head's gradient in fp32, one process in bf16: u = 2^-8
        assert furthest({TIED: ours.pop(TIED)}, {TIED: theirs.pop(TIED)}) <= 2**-8
    gradients = furthest(ours, theirs)
    assert gradients <= row.gradients, ("first gradients, against one process of the same policy", gradients)
    off = [apart(results[0][name], single[name]) for name in ("losses", "norms")]
    assert max(off) <= row.apart, ("against one process of the same policy", off)
    first = apart(results[0]["losses"][:1], single["losses"][:1])
    assert row.gradients > 1e-6 or first <= 1e-6, ("first loss, against one process of the same policy", first)
    if row.equal:
        share = equal_share(joined(results, "moments"), single["moments"])
        assert share >= row.equal, ("moments bit-equal to one process's", share)
    assert_one_number(results)


CHECKS = {check.__name__: check for check in (exact, masks, padded, near, policy)}
