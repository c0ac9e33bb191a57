"""Pairs: the reference, the tangent, and what is counted."""

from tests.proof.bugs.bug import Bug

OBJECTIVE, PROGRAM, CONTEXT, LOSS = (
    "objectives/preference.py",
    "parallel/program.py",
    "parallel/context.py",
    "model/head/loss.py",
)

# fmt: off

PREFERENCES = {
    "adapters are left on in the reference": Bug(
        "a reference that is the model itself: every margin is 0, and the loss log 2 for ever",
        ((PROGRAM, "module.scale = 0.0", "pass"),),
        ("exact: qwen3 tied: shard2 lora dpo",),
    ),
    "the offset is counted by every context rank": Bug(
        "what is added once per row is added by each of the ranks that share it: the gradient is right, the loss is not",
        ((CONTEXT, 'if mesh.coordinate["context"] > 0 and PER_ROW in rows:', "if False:"),),
        ("exact: qwen3 tied: context2 allgather dpo",),
    ),
    "a row's score is of this rank's positions": Bug(
        "scores that are not summed over the ranks that share a row",
        ((PROGRAM, "return -self.mesh.sum_over_context(nats)", "return -nats"),),
        ("exact: qwen3 tied: context2 allgather dpo",),
    ),
    "every pair weighs 1": Bug(
        "the rows' weights do not reach the gradient of the logits",
        ((LOSS, "factors = _product(weights_C, factor)", "factors = factor"),),
        ("exact: qwen3 tied: shard2 dpo",),
    ),
    "sums in place of means per token": Bug(
        "IPO as its paper reads, and not as its authors compute it",
        ((OBJECTIVE, "ratios_P2 / tokens_P2.clamp(min=1)", "ratios_P2 / 1"),),
        ("exact: qwen3 tied: shard2 ipo",),
    ),
    "pairs that count nothing are counted": Bug(
        "padding of a batch makes the mean smaller",
        ((OBJECTIVE, "is_pair_P = (tokens_P2 > 0).all(1)", "is_pair_P = (tokens_P2 >= 0).all(1)"),),
        ("exact: qwen3 tied: shard2 dpo",),
    ),
}
