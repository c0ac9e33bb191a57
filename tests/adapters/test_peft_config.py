"""Which of PEFT's adapters are read, and what a recipe may not say beside one."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_config import completed
from windlass.errors import UserError


def write(directory, **changes):
    directory.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 3, "lora_alpha": 7.0, "target_modules": ["q_proj"]} | changes
    (directory / "adapter_config.json").write_text(json.dumps(given))
    return AdapterConfig(kind="lora", **{"from": str(directory)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "is of kind IA3"),
        ({"use_dora": True}, "has use_dora: True"),
        ({"alpha_pattern": {"q_proj": 64}}, "has alpha_pattern: {'q_proj': 64}"),
        ({"rank_pattern": {"q_proj": 4}}, "all factors have one scale here"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "has target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "at every token"),
        ({"bias": "lora_only"}, "has bias: lora_only"),
        ({"init_lora_weights": "pissa_niter_4"}, "a base that this has changed"),
        ({"r": "3"}, "has r='3'"),
        ({"target_modules": 3}, "targets a list of names"),
    ],
)
def test_adapters_that_cannot_be_read(tmp_path, changes, words):
    with pytest.raises(UserError) as caught:
        completed(write(tmp_path, **changes))
    assert words in str(caught.value)


def test_what_changes_nothing_is_no_reason_to_refuse(tmp_path):
    harmless = {
        "alpha_pattern": {"q_proj": 14.0},
        "rank_pattern": {"q_proj": 6},
        "bias": "none",
        "init_lora_weights": "gaussian",
        "loftq_config": {},
        "lora_bias": False,
    }
    assert completed(write(tmp_path, **harmless)).rank == 3
    assert completed(write(tmp_path, init_lora_weights=True, layer_replication=None)).rank == 3


def test_a_rank_stabilized_scale_is_over_the_root_of_the_rank(tmp_path):
    """7 / sqrt 3 = 14 / sqrt 12; and 28 / 12 = 7 / 3 is one scale only without the root."""
    patterns = {"rank_pattern": {"q_proj": 12}, "alpha_pattern": {"q_proj": 14.0}}
    assert completed(write(tmp_path, use_rslora=True, **patterns)).rank_stabilized is True
    with pytest.raises(UserError, match="all factors have one scale here"):
        completed(write(tmp_path, use_rslora=True, **patterns | {"alpha_pattern": {"q_proj": 28.0}}))


def test_a_rank_that_contradicts_the_files(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError) as caught:
        completed(AdapterConfig(kind="lora", rank=8, **{"from": str(tmp_path)}))
    assert "adapter.rank=8" in str(caught.value) and "rank 3" in str(caught.value)
    assert completed(AdapterConfig(kind="lora", rank=3, **{"from": str(tmp_path)})).alpha == 7.0


def test_an_expression_is_answered_with_the_list_of_the_factors(tmp_path):
    config = write(tmp_path, target_modules=r".*\.(q|v)_proj")
    with pytest.raises(UserError, match=r"regular expressions are not supported") as caught:
        completed(config)
    assert '["q_proj", "v_proj"]' in caught.value.change
    keys = [f"base_model.model.h.{n}.attn.c_attn.lora_{f}.weight" for n in range(2) for f in "AB"]
    save_file(dict.fromkeys(keys, np.zeros((1, 1))), tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError) as caught:
        completed(config)
    assert caught.value.change.endswith('which PEFT reads too: "target_modules": ["c_attn"]')


def test_a_run_in_place_of_an_adapter(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="it is a run") as caught:
        completed(AdapterConfig(kind="lora", **{"from": str(tmp_path)}))
    assert caught.value.change == f"use run.start_from={tmp_path}, or export it and give {tmp_path / 'export'}"
