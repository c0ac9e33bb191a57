"""Which sizes are tried, in which order."""

import pytest

from windlass.model.config import ModelConfig
from windlass.parallel.config import ParallelConfig
from windlass.plan.memory import RankMemory
from windlass.plan.sizes import StepSize, best_first, micro_batches, most_tokens, total_bytes, worth_trying
from windlass.precision.config import PrecisionConfig
from windlass.units import GIB

KINDS = ("none", "selective", "full")


@pytest.mark.parametrize(
    ("sequences", "least", "length", "found"),
    [
        (12, 1, 1024, [1, 2, 3, 4, 6, 12]),
        (12, 2, 1024, [2, 4, 6, 12]),
        (64, 1, 4096, [1, 2, 4]),  # 4 x 4,096 tokens are enough
        (9, 1, 4096, [1, 3, 9]),  # the first divisor with enough
        (8, 1, 32768, [1]),
        (7, 2, 1024, []),
    ],
)
def test_micro_batches_divide_a_ranks_sequences_up_to_enough_tokens(sequences, least, length, found):
    assert micro_batches(sequences, least, length) == found


def test_twice_as_many_tokens_are_tried_where_nothing_is_recomputed():
    assert [micro_batches(64, 1, 4096, most_tokens(kind))[-1] for kind in KINDS] == [8, 4, 4]


def sizes_of(*batches):
    return best_first(StepSize(batch, kind) for batch in batches for kind in KINDS)


def test_more_tokens_come_before_less_recomputation_and_all_else_before_full():
    assert list(map(str, sizes_of(1, 4))) == [
        "run.micro_batch=4 with parallel.recompute=none",
        "run.micro_batch=4 with parallel.recompute=selective",
        "run.micro_batch=1 with parallel.recompute=none",
        "run.micro_batch=1 with parallel.recompute=selective",
        "run.micro_batch=4 with parallel.recompute=full",
        "run.micro_batch=1 with parallel.recompute=full",
    ]


def memory_of(preset, **policy):
    architecture = ModelConfig.model_validate({"preset": preset}).architecture()
    config = ParallelConfig()
    return RankMemory(architecture, config, PrecisionConfig(**policy), config.layout(1), is_compiled=True)


def test_what_the_count_rules_out_is_not_tried_but_for_the_last():
    memory, sizes = memory_of("llama-3.1-8b", policy="bf16"), sizes_of(1, 2, 4)
    assert worth_trying(sizes, memory, 4096, 1000 * GIB) == sizes
    assert worth_trying(sizes, memory, 4096, 1 * GIB) == [StepSize(1, "full")]
    found = worth_trying(sizes, memory, 4096, 180 * GIB)
    assert (
        found[0] == StepSize(4, "selective") and StepSize(4, "none") not in found and found[-1] == StepSize(1, "full")
    )
    bound = total_bytes(memory, StepSize(4, "none"), 4096) / 1.1
    assert worth_trying(sizes, memory, 4096, int(bound) + 1)[0] == StepSize(4, "none"), "up to a tenth over the limit"


def test_llama_8b_in_pure_bf16_takes_a_micro_batch_of_four_on_an_h200():
    """As the published fits have it: 141 GB take micro-batch 4 with selective, and none barely or not."""
    memory = memory_of("llama-3.1-8b", policy="bf16-pure")
    size = worth_trying(sizes_of(1, 2, 4), memory, 4096, int(0.94 * 139 * GIB))[0]
    assert size.micro_batch == 4
    lasting = memory.lasting_bytes()
    assert (lasting.weights + lasting.gradients + lasting.states) / 8.03e9 == pytest.approx(8, rel=0.01)
