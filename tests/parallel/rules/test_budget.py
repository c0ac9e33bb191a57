"""What a budget must hold at the least: every block's input, of all micro-batches that a rank keeps at once."""

import pytest

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.budget import check_least
from windlass.units import GIB


def least(full, ranks, gib, micro_batch=4, **parallel):
    check_least(full, ranks, ParallelConfig(recompute="selective", activation_gib=gib, **parallel), (micro_batch, 8))


def test_the_rank_that_keeps_most_decides():
    quarter, ranks = GIB // 4, [{0: 3, 1: 3}, {2: 1, 3: 1}]
    least([quarter] * 4, ranks, 1.5, pp=2)
    with pytest.raises(UserError) as caught:
        least([quarter] * 4, ranks, 1.4, pp=2)
    assert caught.value.given == "parallel.activation_gib=1.4 with micro-batches of 4 x 8 tokens"
    assert caught.value.rule == "with every block recomputed in full the blocks still keep their inputs: 1.5 GiB"
    assert caught.value.change == "use parallel.activation_gib=1.5", "a smaller micro-batch makes more of them"


def test_without_a_pipeline_a_smaller_micro_batch_that_fits_is_named():
    with pytest.raises(UserError) as caught:
        least([GIB // 4] * 4, [dict.fromkeys(range(4), 1)], 0.6)
    assert caught.value.change == "use parallel.activation_gib=1.0, or run.micro_batch=2"
    least([GIB // 8] * 4, [dict.fromkeys(range(4), 1)], 0.6, micro_batch=2)
