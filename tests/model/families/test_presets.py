"""The named models: their counts against the published ones and the meta model, and how fast they are counted."""

import subprocess
import sys

import pytest
import torch

from windlass.model.config import ModelConfig
from windlass.model.families.presets import PRESETS
from windlass.model.flops import count_active, count_multiplied, count_parameters
from windlass.model.transformer import Decoder


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.3b", 1_315_723_264),
        ("gpt2-26b", 25_870_454_272),
        ("gpt2-65b", 64_861_528_064),
        ("llama-2-13b", 13_015_864_320),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("smollm3-3b", 3_075_098_624),
    ],
)
def test_presets_count_what_they_say(preset, count):
    assert count_parameters(ModelConfig(preset=preset).architecture()) == count


def test_a_token_of_qwen3_30b_a3b_meets_a_tenth_of_it():
    """Counted by hand: all but 120 of the 128 experts of 3 x 768 x 2048 weights in each of 48 layers."""
    arch = ModelConfig(preset="qwen3-30b-a3b").architecture()
    assert count_active(arch) == 30_532_122_624 - 48 * 120 * 3 * 768 * 2048 == 3_353_032_704
    attention, router, expert = 2048 * (2 * 32 + 2 * 4) * 128, 128 * 2048, 3 * 768 * 2048
    assert count_multiplied(arch) == 48 * (attention + router + 8 * expert) + 151936 * 2048


@pytest.mark.parametrize("preset", PRESETS)
def test_counts_are_the_meta_models_without_padding(preset):
    arch = ModelConfig(preset=preset).architecture()
    with torch.device("meta"):
        decoder = Decoder(arch)
    rows = arch.padded_vocab_size - arch.vocab_size
    padding = rows * arch.hidden_size * (1 if arch.tied else 2)
    assert count_parameters(arch) == sum(parameter.numel() for parameter in decoder.parameters()) - padding


def test_every_preset_is_counted_without_torch():
    code = """if True:
        import sys
        from windlass.model.config import ModelConfig
        from windlass.model.families.presets import PRESETS
        from windlass.model.flops import count_parameters, flops_per_token
        for preset in PRESETS:
            architecture = ModelConfig(preset=preset).architecture()
            count_parameters(architecture), flops_per_token(architecture, 4096)
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
