"""kill -9 at random moments of saves. Each trial restores, saves the next step, and is killed somewhere in between or
after.

The directory lives on from trial to trial, so pruning, sweeping and saving again over leftovers are hit too.
"""

import random

import pytest

from tests.checkpoint import cases
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.verify import verify_checkpoint
from windlass.proof.pool import RankFailed


def kill_trials(ranks, run, count, asynchronous, everyone, seed):
    """-> how many saves were cut short, how many were committed. Asserts after each what must hold."""
    draw, checkpoints, duration_s, cut, done = random.Random(seed), run / "checkpoints", 0.0, 0, 0
    ranks.close()  # as after a kill: the measured save, too, is the first one of fresh processes
    for trial in range(count + 1):
        before = committed_steps(checkpoints)
        delay_s = (
            draw.uniform(0, 1.4 * duration_s) if trial else None
        )  # the first one runs through and says how long it is
        try:
            found = ranks.run(2, cases.killed_while_saving, checkpoints, asynchronous, everyone, delay_s)
            duration_s = duration_s or max(seconds for _, seconds in found)
            restored = {step for step, _ in found}
            assert restored == {before[0] if before else 0}
        except RankFailed as failure:
            assert "AssertionError" not in str(failure), failure
        after = committed_steps(checkpoints)
        expected = before[0] if before else 0
        assert after and after[0] in (expected, expected + 1), (before, after)
        done, cut = done + (after[0] == expected + 1), cut + (after[0] == expected)
        if trial:  # a busier or an idler machine than at the first save: kills stay among both
            duration_s *= 1.2 if after[0] == expected else 1 / 1.2
        for step in after:
            assert verify_checkpoint(checkpoints / f"step-{step:08d}") == []
    assert ranks.run(2, cases.load_values, checkpoints)[0] == (after[0], {float(after[0])})
    assert ranks.run(1, cases.load_values, checkpoints)[0][0] == after[0]
    return cut, done


@pytest.mark.parametrize(
    ("asynchronous", "everyone"),
    [
        pytest.param(False, True, id="sync-all ranks"),
        pytest.param(True, False, id="async-one rank"),
        pytest.param(False, False, id="sync-one rank", marks=pytest.mark.long),
        pytest.param(True, True, id="async-all ranks", marks=pytest.mark.long),
    ],
)
def test_the_last_or_last_but_one_step_loads_after_each_of_3_kills(ranks, tmp_path, asynchronous, everyone):
    kill_trials(ranks, tmp_path, 3, asynchronous, everyone, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("everyone", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_last_or_last_but_one_step_loads_after_each_of_25_kills(ranks, tmp_path, asynchronous, everyone):
    cut, done = kill_trials(ranks, tmp_path, 25, asynchronous, everyone, seed=2)
    print(f"{cut} saves cut short, {done} committed")
    assert cut >= 3 and done >= 3, "the kills must fall into the saves, and some after the commit"
