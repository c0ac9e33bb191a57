"""Granite's four factors."""

import pytest

from tests.model.families.test_family_table import architecture
from windlass.model.families.family_table import to_hf


@pytest.mark.parametrize("divisor", [8.0, 49.0, 0.37, 13.3])
def test_the_divisor_of_logits_survives_its_own_config_json(divisor):
    arch = architecture("granite", logits_scaling=divisor)
    written = to_hf(arch)["logits_scaling"]
    assert 1 / written == arch.logit_scale == 1 / divisor and (written == divisor or divisor % 1)


def test_its_scores_are_not_divided_by_the_root_of_the_channels():
    assert architecture("granite").score_scale == 1.0
    assert architecture("granite", attention_multiplier=0.25).score_scale == 0.25
