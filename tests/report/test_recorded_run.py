"""What the Recorder is given of a run."""

import pytest

from windlass.report.recorded_run import Gauges, ModelFlops


def test_utilization_is_the_share_of_one_devices_peak_and_none_where_the_peak_is_unknown():
    assert ModelFlops(per_token=2e6, peak=1e9).utilization(125.0) == pytest.approx(0.25)
    assert ModelFlops(per_token=2e6, peak=None).utilization(125.0) is None


def test_without_a_measurement_memory_has_no_parts():
    assert Gauges(gather_max=max, memory=float).memory_parts(7.0) == {}
