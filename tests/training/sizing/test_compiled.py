"""Kernels whose threads race: found in what torch's compiler wrote, refused after the first step, and not chosen."""

import types

import pytest
from torch._inductor.codecache import PyCodeCache

from tests import tiny
from windlass.checkpoint.commit import committed_steps
from windlass.errors import UserError
from windlass.runtime import start_runtime
from windlass.training import run as run_page
from windlass.training.loop import train
from windlass.training.sizing.compiled import racing_in, racing_kernels, refuse_races

KERNEL = """
async_compile.triton('{name}', '''
@triton_heuristics.reduction(size_hints={{'x': 8192, 'r0_': 256}})
@triton.jit
def {name}(in_ptr0, in_out_ptr0, out_ptr0, out_ptr2, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp6 = tl.load(in_ptr0 + (r0_1 + 256*x0), r0_mask, other=0.0).to(tl.float32)
        tmp7 = tl.load(in_out_ptr0 + (r0_1 + 256*x0), r0_mask, other=0.0).to(tl.float32)
        tl.store(in_out_ptr0 + (r0_1 + 256*x0), tmp7, r0_mask)
        tl.store(out_ptr0 + (r0_1 + 256*x0), tmp6, r0_mask)
    tmp28 = tl.sum(_tmp28, 1)[:, None]
{barrier}    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp31 = tl.load({again} + (r0_1 + 256*x0), r0_mask, eviction_policy='evict_first', other=0.0)
        tl.store(out_ptr2 + (r0_1 + 256*x0), tmp31, r0_mask)
''', device_str='cuda')
"""


def kernel(name, again="out_ptr0", barrier=""):
    return KERNEL.format(name=name, again=again, barrier=barrier)


def test_a_kernel_that_reads_back_without_a_barrier_races():
    assert racing_in(kernel("triton_red_a")) == ["triton_red_a"]
    assert racing_in(kernel("triton_red_a", again="in_out_ptr0")) == ["triton_red_a"]
    assert racing_in(kernel("triton_red_a", again="in_ptr0")) == []
    assert racing_in(kernel("triton_red_a", barrier="    tl.debug_barrier()\n")) == []
    assert racing_in(kernel("triton_red_a", barrier="    # a word\n")) == ["triton_red_a"]
    # what one kernel stores another may load
    assert racing_in(kernel("triton_red_a", again="in_ptr0") + kernel("triton_red_b", again="in_ptr0")) == []
    assert racing_in(kernel("triton_red_a", again="in_ptr0") + kernel("triton_red_b")) == ["triton_red_b"]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """What torch has compiled, as far as these tests know: modules of these texts."""
    monkeypatch.setattr(PyCodeCache, "modules", [])

    def add(*texts):
        for number, text in enumerate(texts):
            path = tmp_path / f"compiled{number}.py"
            path.write_text(text)
            PyCodeCache.modules.append(types.SimpleNamespace(__file__=str(path)))
        PyCodeCache.modules.append(types.SimpleNamespace(__file__=str(tmp_path / "gone.py")))

    return add


def test_all_modules_are_looked_at_and_the_message_says_what_to_do(compiled):
    with start_runtime() as runtime:
        assert racing_kernels(runtime) == []
        refuse_races(runtime)
        compiled(kernel("triton_red_b"), kernel("triton_red_a") + kernel("triton_red_c", again="in_ptr0"))
        assert racing_kernels(runtime) == ["triton_red_a", "triton_red_b"]
        with pytest.raises(UserError) as refused:
            refuse_races(runtime)
    assert refused.value.given.startswith(
        "parallel.compile=true: the compiled kernel triton_red_a and 1 more reads back"
    )
    assert "this step was not saved" in refused.value.rule and refused.value.change.startswith(
        "use parallel.compile=false"
    )


def test_a_run_ends_after_its_first_step_and_has_saved_nothing(tmp_path, compiled, monkeypatch):
    compiled(kernel("triton_red_a"))
    seen = []
    # a CPU compiles nothing of Triton's: the run is made to find that it does
    monkeypatch.setattr(run_page, "refuse_races", lambda runtime: seen.append(1) or refuse_races(runtime))
    config = tiny.recipe(tmp_path, run={"steps": 3}, checkpoint={"every_steps": 1})
    assert train(config).step == 3 and not seen, "nothing is looked at where nothing is compiled"
    config = tiny.recipe(
        tmp_path, "compiled", run={"steps": 3}, checkpoint={"every_steps": 1}, parallel={"compile": True}
    )
    monkeypatch.setattr("torch.nn.Module.compile", lambda *_args, **_more: None)
    monkeypatch.setattr("windlass.model.head.head.Head.compile_loss", lambda *_args: None)
    with pytest.raises(UserError, match="reads back"):
        train(config)
    assert seen == [1] and 1 not in committed_steps(config.run.directory / "checkpoints")
