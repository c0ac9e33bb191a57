"""The numbers in the event of a start: written, read back, and absent from older runs."""

from windlass.advice.facts import RunFacts

FACTS = RunFacts(
    device="CPU", ranks=4, hosts=1, layout={"pp": 1, "replicate": 1, "shard": 4, "context": 1, "tp": 1, "expert": 1},
    accumulation=2, elements=1000, end_elements=200, trained_elements=1000, units=5,
    end_units=1, gathered_bytes=2, fp8_elements=0,
    reduced_bytes=4, buckets=4, usual_buckets=1, flops_per_token=6000.0, recomputed_flops=0.0, peak_flops=None, filled=1.0,
)  # fmt: skip


def test_they_survive_the_event_and_a_later_version_may_write_more():
    assert RunFacts.of_event(FACTS.to_event()) == FACTS
    assert RunFacts.of_event({**FACTS.to_event(), "later": 1}) == FACTS


def test_an_event_without_them_has_none():
    assert RunFacts.of_event(None) is None and RunFacts.of_event([]) is None
    assert RunFacts.of_event({name: value for name, value in FACTS.to_event().items() if name != "filled"}) is None
