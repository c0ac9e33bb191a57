"""GLM-4's norms and rope."""

from dataclasses import replace

import pytest

from tests.model.families.test_family_table import architecture
from windlass.model.config import architecture_from_hf
from windlass.model.families.family_table import to_hf


def test_half_of_a_head_rotates_in_neighbouring_pairs():
    arch = architecture("glm4")
    assert (arch.head_dim, arch.rotary_dim, arch.rope_interleaved) == (128, 64, True)
    assert architecture("glm4", partial_rotary_factor=None).rotary_dim is None
    assert (arch.qkv_bias, arch.out_bias) == (True, False) and arch.norm_inputs and arch.norm_outputs


@pytest.mark.parametrize("rotated", [2, 6, 10, 12])
def test_the_part_survives_its_own_config_json(rotated):
    arch = replace(architecture("glm4", head_dim=14, partial_rotary_factor=1.0), rotary_dim=rotated)
    assert architecture_from_hf(to_hf(arch)) == arch
