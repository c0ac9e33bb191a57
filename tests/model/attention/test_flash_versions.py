"""Versions of FlashAttention: what rules one out, what a trial finds, and that torch's registry is left as it was."""

import dataclasses
import sys

import pytest
import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from tests.model.attention.flash_on_cpu import Kernel, flash_on_cpu
from tests.model.tiny import hf_model, our_model
from windlass.model.attention.flash_versions import (
    cuda_capability,
    flash_kept,
    has_package,
    try_flash_version,
    use_torchs_flash,
    why_no_flash,
    why_not_for,
    why_not_here,
)

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(scope="module")
def arch():
    """Two query heads per key head; a window in one of its layers."""
    smollm3 = our_model(hf_model("smollm3", True, use_sliding_window=True, sliding_window=4)).arch
    return dataclasses.replace(smollm3, num_heads=4, num_kv_heads=2, head_dim=16, window=300, window_layers=(0,))


@pytest.mark.parametrize(
    ("version", "capability", "is_installed", "why"),
    [
        (3, (9, 0), True, None),
        (4, (9, 0), True, None),
        (4, (10, 0), True, None),
        (4, (10, 3), True, None),
        (3, None, True, "it runs on NVIDIA's GPUs alone"),
        (3, (10, 0), True, "it needs compute capability 9.x, and this device has 10.0"),
        (3, (8, 0), True, "it needs compute capability 9.x, and this device has 8.0"),
        (4, (12, 0), True, "it needs compute capability 9.x or 10.x, and this device has 12.0"),
        (3, (9, 0), False, "its package flash_attn_interface is not installed"),
        (4, (9, 0), False, "its package flash_attn.cute is not installed"),
    ],
)
def test_a_device_or_a_missing_package_rules_a_version_out(version, capability, is_installed, why):
    assert why_not_here(version, capability, is_installed) == why


@pytest.mark.parametrize(
    ("dtype", "changes", "why"),
    [
        (BF16, {}, None),
        (torch.float16, {"head_dim": 256}, None),
        (BF16, {"attn_dropout": 0.1}, "attention weights are dropped, which runs unfused"),
        (BF16, {"score_cap": 50.0}, "scores are capped, which runs unfused"),
        (torch.float32, {}, "it takes 16 bits and heads of 8 to 256 channels by eights, not float32 and 16 channels"),
        (
            BF16,
            {"head_dim": 264},
            "it takes 16 bits and heads of 8 to 256 channels by eights, not bfloat16 and 264 channels",
        ),
        (
            BF16,
            {"head_dim": 12},
            "it takes 16 bits and heads of 8 to 256 channels by eights, not bfloat16 and 12 channels",
        ),
    ],
)
def test_what_attend_gives_no_flash_kernel_has_no_version(arch, dtype, changes, why):
    changed = dataclasses.replace(arch, **changes)
    assert why_no_flash(changed, dtype) == why
    assert why_not_for(4, changed, dtype, False) == why


@pytest.mark.parametrize(
    ("version", "head_dim", "is_deterministic", "is_refused"),
    [(3, 256, True, True), (3, 192, True, False), (3, 256, False, False), (4, 256, True, False)],
)
def test_version_3_repeats_its_bits_with_narrow_heads_alone(arch, version, head_dim, is_deterministic, is_refused):
    why = why_not_for(version, dataclasses.replace(arch, head_dim=head_dim), BF16, is_deterministic)
    expected = "its deterministic backward takes at most 192 channels per head, not 256"
    assert why == (expected if is_refused else None)


def test_only_nvidias_gpus_have_a_capability(monkeypatch):
    assert cuda_capability(CPU) is None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 4))
    assert cuda_capability(torch.device("cuda")) == (9, 4)
    monkeypatch.setattr("torch.version.hip", "7.0")  # an MI300X is 9.4, too
    assert cuda_capability(torch.device("cuda")) is None


def test_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    assert not has_package(3) and not has_package(4)
    monkeypatch.syspath_prepend(tmp_path)
    fails = "raise ImportError('built for another torch')"
    (tmp_path / "flash_attn_interface.py").write_text(fails)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(fails)
    assert has_package(3) and not has_package(4), "flash-attn, version 2, has the same root"
    (tmp_path / "flash_attn" / "cute").mkdir()
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text(fails)
    assert has_package(4)
    assert not {"flash_attn", "flash_attn_interface"} & set(sys.modules)


def tried(arch, version=3, slices=False, is_deterministic=False, dtype=BF16):
    return try_flash_version(version, arch, dtype, CPU, slices=slices, is_deterministic=is_deterministic)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("version", "name"), [(3, "FA3"), (4, "FA4")])
def test_a_right_kernel_stays_active_and_draws_no_random_number(arch, version, name, dtype):
    kernel, state = Kernel(), torch.get_rng_state()
    with flash_on_cpu(**{name: kernel}):
        assert tried(arch, version, slices=True, is_deterministic=True, dtype=dtype) is None
        assert current_flash_attention_impl() == name
    assert kernel.calls == ["forward", "backward"] * 8, (
        "two offsets, with and without a window, each twice for its bits"
    )
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ("import", {}, "tried before step 0 it raised ImportError: undefined symbol: _ZN3c10"),
        ("backward", {}, "tried before step 0 it raised AssertionError: deterministic backward is not supported"),
        ("border", {}, "tried before step 0, the output was off by "),
        ("window", {}, "tried before step 0, the output was off by "),
        ("keys", {"slices": True}, "tried before step 0, the gradient of keys was off by "),
        (
            "bits",
            {"is_deterministic": True},
            "tried before step 0, a second call gave other bits, and run.deterministic is set",
        ),
    ],
)
def test_a_wrong_kernel_is_named_and_not_left_active(arch, fault, options, words):
    with flash_on_cpu(FA3=Kernel(fault)):
        why = tried(arch, **options)
        assert why.startswith(words) and "\n" not in why
        assert current_flash_attention_impl() is None


def test_what_a_run_does_not_compute_does_not_rule_a_kernel_out(arch):
    no_window = dataclasses.replace(arch, window=None, window_layers=())
    for fault, shape in (("window", no_window), ("keys", arch), ("bits", arch)):
        with flash_on_cpu(FA3=Kernel(fault)):
            assert tried(shape) is None


def test_what_was_active_before_is_active_after(arch):
    with flash_on_cpu(FA3=Kernel("border"), FA4=Kernel()):
        activate_flash_attention_impl("FA4")
        assert tried(arch) is not None and current_flash_attention_impl() == "FA4"
        with flash_kept():
            use_torchs_flash()
            assert current_flash_attention_impl() is None
        assert current_flash_attention_impl() == "FA4"
    with flash_on_cpu(FA3=Kernel()):
        with flash_kept():
            assert tried(arch) is None and current_flash_attention_impl() == "FA3"
        assert current_flash_attention_impl() is None


def test_torch_has_both_names_in_its_registry():
    """The names are torch's: a version that renames them is noticed here."""
    assert {"FA3", "FA4"} <= set(torch.nn.attention.list_flash_attention_impls())


def test_a_package_that_is_missing_is_a_reason_and_no_error(arch):
    assert tried(arch, 3) == "tried before step 0 it raised ModuleNotFoundError: No module named 'flash_attn_interface'"
    assert tried(arch, 4).startswith("tried before step 0 it raised ModuleNotFoundError: No module named 'flash_attn")
    assert current_flash_attention_impl() is None
