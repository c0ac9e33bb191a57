"""run.flash_attention: what each rank says, what a recipe may ask, what a resumed run keeps, and what a CPU does: nothing."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

from tests import tiny
from tests.model.attention.flash_on_cpu import Kernel, flash_on_cpu
from windlass.errors import UserError
from windlass.model.config import architecture_from_hf
from windlass.training.sizing import choose_flash as page
from windlass.training.sizing.choose_flash import check_flash, choose_flash
from windlass.training.start.drift import drift

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
ARCH = architecture_from_hf({"model_type": "llama", "num_key_value_heads": 2, **SMALL})
GPU = "NVIDIA H200"


def recipe(base, version="auto", isolate=True, policy="bf16", run=None, **sections):
    run = {"flash_attention": version, **(run or {})}
    return tiny.recipe(base, "flash", run=run, data={"isolate": isolate}, precision={"policy": policy}, **sections)


def runtime(others=(), name=GPU, capabilities=()):
    """`others`: why a version does not run on the ranks after this one; `capabilities`: of their devices."""

    def gathered(own):
        return [own, *(capabilities if isinstance(own, tuple) else others)]

    return SimpleNamespace(
        device=torch.device("cpu"), device_name=lambda: name, gathered=gathered, shared=lambda value: value
    )


@pytest.fixture
def hopper(monkeypatch):
    """A device of capability 9.0, with both packages; its tensors are the CPU's, and so are the kernels of flash_on_cpu."""
    monkeypatch.setattr(page, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(page, "has_package", lambda version: True)


def chosen(config, before=None, arch=ARCH, ranks=None):
    """The version in the config, what was active meanwhile, and the sentences; afterwards none is."""
    with ExitStack() as opened:
        found, sentences = choose_flash(config, before, arch, ranks or runtime(), opened)
        active = current_flash_attention_impl()
    assert current_flash_attention_impl() is None
    return found.run.flash_attention, active, sentences


def begun_with(version, device=GPU):
    run = {} if version is None else {"flash_attention": version}
    return {"device": device, "config": {"run": run}}


def test_a_cpu_chooses_nothing_and_says_nothing(base):
    kernel = Kernel()
    with flash_on_cpu(FA3=kernel, FA4=kernel):
        assert chosen(recipe(base), ranks=runtime(name="CPU")) == ("auto", None, [])
    assert kernel.calls == []


@pytest.mark.parametrize(
    ("changes", "arch", "capability"),
    [
        ({"isolate": False}, {}, (9, 0)),
        ({"policy": "fp32"}, {}, (9, 0)),
        ({}, {"attention_dropout": 0.1}, (9, 0)),
        ({}, {}, (8, 0)),
    ],
    ids=["rows of one document", "fp32", "dropout", "a device without"],
)
def test_where_no_version_would_run_nothing_is_chosen(base, hopper, monkeypatch, changes, arch, capability):
    monkeypatch.setattr(page, "cuda_capability", lambda device: capability)
    model = architecture_from_hf({"model_type": "llama", "num_key_value_heads": 2, **SMALL, **arch})
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        assert chosen(recipe(base, **changes), arch=model) == ("auto", None, [])


def test_where_one_rank_has_another_device_nothing_is_chosen(base, hopper):
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        assert chosen(recipe(base), ranks=runtime([None], capabilities=[(8, 0)])) == ("auto", None, [])
        assert chosen(recipe(base), ranks=runtime([None], capabilities=[(9, 0)]))[:2] == (3, "FA3")


def test_the_first_version_that_is_right_runs_until_the_run_is_closed(base, hopper):
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        assert chosen(recipe(base)) == (3, "FA3", [f"run.flash_attention=auto: 3, tried on {GPU}"])
    with flash_on_cpu(FA3=Kernel("border"), FA4=Kernel()):
        version, active, (sentence,) = chosen(recipe(base))
    assert (version, active) == (4, "FA4")
    assert sentence.startswith(
        f"run.flash_attention=auto: 4, tried on {GPU}; 3: tried before step 0, the output was off"
    )


def test_a_missing_package_is_said_and_torchs_own_runs(base, hopper, monkeypatch):
    monkeypatch.setattr(page, "has_package", lambda version: False)
    said = (
        "run.flash_attention=auto: 2; 3: its package flash_attn_interface is not installed; "
        "4: its package flash_attn.cute is not installed"
    )
    assert chosen(recipe(base)) == (2, None, [said])


def test_all_ranks_take_what_runs_on_each(base, hopper):
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        version, active, (sentence,) = chosen(recipe(base), ranks=runtime(["its package is not installed"]))
    assert (version, active) == (2, None), "active here, it was right; on rank 1 it is not there"
    assert "3: rank 1: its package is not installed; 4: rank 1: its package" in sentence


def test_two_is_torchs_own_whatever_is_installed(base, hopper):
    kernel = Kernel()
    with flash_on_cpu(FA3=kernel, FA4=kernel):
        assert chosen(recipe(base, 2)) == (2, None, [])
    assert kernel.calls == []


def test_a_version_that_is_asked_for_runs_or_is_refused(base, hopper, monkeypatch):
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        assert chosen(recipe(base, 4)) == (4, "FA4", [])
    with (
        flash_on_cpu(FA3=Kernel("backward"), FA4=Kernel()),
        pytest.raises(UserError) as refused,
    ):
        chosen(recipe(base, 3))
    assert refused.value.given == (
        f"run.flash_attention=3 on {GPU}: tried before step 0 it raised AssertionError: deterministic backward is not supported"
    )
    assert "runs on every rank" in refused.value.rule
    assert refused.value.change == (
        "set run.flash_attention=auto, which takes what runs, or build flash_attn_interface in hopper/ of "
        "github.com/Dao-AILab/flash-attention, on a device that has it"
    )
    monkeypatch.setattr(page, "has_package", lambda version: version == 3)
    check_flash(recipe(base, 3), runtime())
    with pytest.raises(UserError, match=r"=4 on NVIDIA H200: its package flash_attn.cute is not installed") as refused:
        check_flash(recipe(base, 4), runtime())
    assert "or pip install flash-attn-4" in refused.value.change


def test_before_data_is_prepared_a_device_that_lacks_it_refuses(base):
    with pytest.raises(UserError, match=r"run.flash_attention=4 on CPU: it runs on NVIDIA's GPUs alone"):
        check_flash(recipe(base, 4), runtime(name="CPU"))
    for version in ("auto", 2):
        check_flash(recipe(base, version), runtime(name="CPU"))


@pytest.mark.parametrize(
    ("before", "version", "words"),
    [
        (begun_with(4), 4, [f"run.flash_attention=auto: 4, as the run began on {GPU}"]),
        (begun_with(2), 2, [f"run.flash_attention=auto: 2, as the run began on {GPU}"]),
        (begun_with(None), 2, [f"run.flash_attention=auto: 2, as the run began on {GPU}"]),
        (begun_with("auto"), 3, [f"run.flash_attention=auto: 3, tried on {GPU}"]),
        (begun_with(2, "NVIDIA A100-SXM4-80GB"), 3, [f"run.flash_attention=auto: 3, tried on {GPU}"]),
    ],
    ids=["4", "2", "before the setting", "nothing was chosen", "another device"],
)
def test_a_resumed_run_keeps_its_version_on_the_same_device(base, hopper, before, version, words):
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        assert chosen(recipe(base), before)[::2] == (version, words)


def test_a_resumed_run_whose_version_is_gone_chooses_anew_and_says_so(base, hopper):
    with flash_on_cpu(FA3=Kernel("import"), FA4=Kernel()):
        version, active, (sentence,) = chosen(recipe(base), begun_with(3))
    assert (version, active) == (4, "FA4")
    assert sentence.endswith("; the run began with 3: results differ from here on as rounding does")
    assert "; 3: tried before step 0 it raised ImportError" in sentence


def test_another_version_is_no_drift(base):
    assert drift(recipe(base, 3).kept(), recipe(base).kept()) == []
    assert [one.key for one in drift(recipe(base, 3).kept(), recipe(base, policy="fp16").kept())] == [
        "precision.policy"
    ]


def test_a_deterministic_run_takes_no_kernel_that_varies(base, hopper):
    with flash_on_cpu(FA3=Kernel("bits"), FA4=Kernel("bits")):
        assert chosen(recipe(base))[0] == 3
        version, _, (sentence,) = chosen(recipe(base, run={"deterministic": True}))
    assert version == 2 and sentence.count("a second call gave other bits") == 2


def test_a_version_goes_with_documents_and_16_bits(base):
    with pytest.raises(UserError) as refused:
        recipe(base, 3, isolate=False)
    assert refused.value.given == "run.flash_attention=3 with data.isolate=false"
    assert "rows hold several documents" in refused.value.rule and "data.isolate=true" in refused.value.change
    with pytest.raises(UserError) as refused:
        recipe(base, 4, policy="fp32")
    assert refused.value.given == "run.flash_attention=4 with products in fp32"
    assert refused.value.rule == "FlashAttention computes in 16 bits"
    assert refused.value.change == "use precision.policy=bf16, or remove run.flash_attention"
    for accepted in ({"policy": "auto"}, {"isolate": False, "parallel": {"context": 2}}):
        assert recipe(base, 3, **accepted).run.flash_attention == 3
    for version in ("auto", 2):
        recipe(base, version, isolate=False, policy="fp32")


@pytest.mark.parametrize("version", [1, "3x", True])
def test_another_version_is_no_value(base, version):
    with pytest.raises(UserError, match=r"run\.flash_attention"):
        recipe(base, version)
