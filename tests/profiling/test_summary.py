"""Where a step's time goes: of traces made by hand, of one that an A100 recorded, and of gloo's collectives by axis."""

import gzip
import json
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.profiling.summary import OperatorTime, Summary, Traffic, newest, operator_kind, summarize

RECORDED = Path(__file__).parent / "recordings" / "ddp_a100.json"
STEP = {"ph": "X", "cat": "user_annotation", "tid": 1}


def written(directory, events, collectives=(), axes=None):
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"rank": 1, "first_step": 8, "last_step": 9, "device": "CPU", "axes": axes or {}}
    (directory / "facts.json").write_text(json.dumps(facts))
    (directory / "collectives.json").write_text(json.dumps(list(collectives)))
    with gzip.open(directory / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    return directory


def op(name, ts, dur, tid=1, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def sent(name, number, group, sizes):
    kinds = ["Float"] * len(sizes)
    return {
        "record_id": number, "profiling_name": name, "process_group": [group, ""], "input_sizes": sizes, "input_dtypes": kinds,
        "output_sizes": sizes, "output_dtypes": kinds,
    }  # fmt: skip


def test_a_step_on_cpu_is_computing_communication_that_nothing_hides_and_idle(tmp_path):
    """Two steps of 500 us. An operator that calls another counts without it; nodes of autograd only wait."""
    events = [
        {**STEP, "name": "step 8", "ts": 1000, "dur": 490},
        {**STEP, "name": "step 9", "ts": 1500, "dur": 500},
        op("autograd::engine::evaluate_function: MmBackward0", 1000, 300),
        op("MmBackward0", 1000, 280),
        op("aten::linear", 1010, 100),
        op("aten::mm", 1020, 60),
        op("aten::silu", 1600, 50),
        op("c10d::allreduce_", 1700, 400),
        op("gloo:all_reduce", 1090, 100, tid=7, cat="user_annotation", **{"Input Dims": [[4, 8]]}),
        op("gloo:all_reduce", 1700, 30, tid=8, cat="user_annotation", **{"Input Dims": [[]]}),
        op("aten::mm", 2500, 99),  # after the last step
    ]
    groups = [sent("gloo:all_reduce", 3, "7", [[4, 8]]), sent("gloo:all_reduce", 4, "9", [[]])]
    found = summarize(written(tmp_path, events[:-1], groups, {"7": "fsdp", "9": "loss"}))
    each = {
        name: round(1e6 * getattr(found, f"{name}_s"), 6)
        for name in ("step", "computing", "communicating", "hidden", "idle")
    }
    assert each == {"step": 500, "computing": 75, "communicating": 65, "hidden": 10, "idle": 370}
    assert [(row.name, round(1e6 * row.seconds, 6), row.calls) for row in found.kinds] == [
        ("matrix products", 50, 1.0), ("elementwise and reductions", 25, 0.5),
    ]  # fmt: skip
    assert [(row.name, round(1e6 * row.seconds, 6)) for row in found.operators] == [
        ("aten::mm", 30), ("aten::silu", 25), ("aten::linear", 20),
    ]  # fmt: skip
    assert found.traffic == (
        Traffic("fsdp", "all-reduce", 0.5, 64.0, pytest.approx(50e-6)),
        Traffic("loss", "all-reduce", 0.5, 2.0, pytest.approx(15e-6)),
    )


def test_a_recorded_step_of_a_gpu_is_counted_as_it_is_microsecond_by_microsecond(tmp_path):
    """The oracle marks single microseconds, and adds up what NCCL's kernels say they sent."""
    kernels = json.loads(RECORDED.read_text())["traceEvents"]
    events = [{**STEP, "name": "step 1", "ts": 0, "dur": 30000}, *kernels]
    found = summarize(written(tmp_path, events, axes={"0": "replicate"}))
    marks = {True: set(), False: set()}
    for event in kernels:
        marks["nccl" in event["name"]] |= set(range(round(event["ts"]), round(event["ts"] + event["dur"])))
    close = {"abs": 0.12e-3}  # spans are rounded to microseconds, up to 200 of them
    assert found.step_s == pytest.approx(30e-3)
    assert found.computing_s == pytest.approx(1e-6 * len(marks[False]), **close)
    assert found.communicating_s == pytest.approx(1e-6 * len(marks[True]), **close)
    assert found.hidden_s == pytest.approx(1e-6 * len(marks[True] & marks[False]), **close)
    assert found.idle_s == pytest.approx(30e-3 - 1e-6 * len(marks[True] | marks[False]), **close)
    reduced = [event for event in kernels if event["args"].get("Collective name") == "allreduce"]
    assert len(reduced) == 3
    assert found.traffic == (
        Traffic(
            "replicate",
            "all-reduce",
            3.0,
            4.0 * sum(event["args"]["In msg nelems"] for event in reduced),
            pytest.approx(1e-6 * sum(event["dur"] for event in reduced)),
        ),
    )
    assert "communication" not in {row.name for row in found.kinds}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_TNN", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("aten::_scaled_mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float>", "softmax and loss"),
        ("Memcpy DtoH (Device -> Pinned)", "copies and casts"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copies and casts"),
        ("aten::embedding_dense_backward", "embedding and indexing"),
        ("triton_poi_fused_add_mul_silu_3", "compiled"),
        ("Torch-Compiled Region: 0/0", "compiled"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>", "elementwise and reductions"),
        ("aten::mul_", "elementwise and reductions"),
        ("aten::empty", "other"),
    ],
)  # fmt: skip
def test_an_operator_is_of_the_kind_that_its_name_says(name, kind):
    assert operator_kind(name) == kind


def test_a_summary_is_read_as_it_was_written_and_the_newest_is_found(tmp_path):
    row = OperatorTime("copies and casts", 0.25, 3.0)
    traffic = Traffic("tp", "all-reduce", 1, 2, 3)
    of = [Summary(0, at, at + 1, "CPU", 1.0, 0.5, 0.2, 0.1, 0.4, (row,), (row,), (traffic,)) for at in (4, 9)]
    assert newest(tmp_path) is None
    for number, summary in enumerate(of):
        directory = tmp_path / "profiles" / f"step-{number:08d}-rank-0"
        directory.mkdir(parents=True)
        summary.write(directory)
        assert Summary.read(directory) == summary
        assert newest(tmp_path) == summary
    (directory / "summary.json").write_text("{")
    assert newest(tmp_path) == of[0], "what is damaged is passed over"


@pytest.mark.parametrize("file", ["trace.json.gz", "collectives.json", "facts.json"])
def test_what_is_no_whole_profile_is_refused_by_name(tmp_path, file):
    written(tmp_path, [{**STEP, "name": "step 1", "ts": 0, "dur": 1}])
    whole = (tmp_path / file).read_bytes()
    for damaged in (whole[: len(whole) // 2], None):
        (tmp_path / file).unlink()
        if damaged is not None:
            (tmp_path / file).write_bytes(damaged)
        with pytest.raises(UserError, match="holds no complete profile") as refused:
            summarize(tmp_path)
        assert "ask again" in refused.value.change
        (tmp_path / file).write_bytes(whole)
