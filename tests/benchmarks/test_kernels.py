"""Kernels of a step: sorted by kind, summed, and shown."""

import json

from kernels import SETUPS, gaps, kind_of, main, make_cells, summed

H200 = {  # names as an H200 gave them
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "triton_poi_fused__unsafe_view_mul_silu_4": "compiled",
    "Memset (Device)": "copies",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::LpNormFunctor>": "norm of the gradients",
    "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>>": "elementwise",
    "void at::native::reduce_kernel<512>": "other",
}


def test_each_kernel_has_its_kind():
    assert {kernel: kind_of(kernel) for kernel in H200} == H200


def test_kinds_are_sums_and_the_longest_kernels_come_first():
    rows = [("Memset (Device)", 1000.0, 6), ("nvjet_a", 4000.0, 8), ("nvjet_b", 2000.0, 2)]  # of two steps
    found = summed(rows, 0.004, SETUPS["smollm3-3b"])
    assert found["kinds"] == {"copies": {"ms": 0.5, "launches": 3}, "products": {"ms": 3.0, "launches": 5}}
    assert (found["wall_ms"], found["kernels_ms"], found["tokens"]) == (4.0, 3.5, 32768)
    assert [one["kernel"] for one in found["kernels"]] == ["nvjet_a", "nvjet_b", "Memset (Device)"]


def test_gaps_are_where_no_kernel_runs_by_the_kernels_around_them():
    runs = [
        ("b", 100.0, 200.0),
        ("a", 0.0, 50.0),
        ("long", 300.0, 900.0),
        ("inside", 400.0, 500.0),
        ("a", 930.0, 940.0),
    ]
    runs += [("b", 970.0, 980.0), ("b", 985.0, 990.0)]
    assert gaps(runs) == [
        {"before": "b", "behind": "long", "ms": 0.1, "times": 1},
        {"before": "a", "behind": "b", "ms": 0.08, "times": 2},
        {"before": "long", "behind": "a", "ms": 0.03, "times": 1},
    ]


def test_a_trial_names_what_a_cpu_ran(tmp_path, capsys):
    assert [cell.name for cell in make_cells(tiny=False)] == list(SETUPS)
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cells"]
    assert row["result"]["kinds"]["attention"]["launches"] > 0 and row["result"]["tokens"] == 256
    assert all(gap["ms"] >= 0.02 for gap in row["result"]["gaps"])
    assert "by the clock" in capsys.readouterr().out
