"""The script of this GPU's rates: its cells, a trial of some, and the marks of what cannot be."""

import json

import pytest
import torch
from book import Book
from cells import Absent
from ground_truth import LENGTHS, MODELS, ROWS, main, make_cells, marks
from torch.nn.attention import current_flash_attention_impl

from tests.model.attention.flash_on_cpu import Kernel, flash_on_cpu

KINDS = {"default", "cudnn", "flash", "efficient", "masked", "varlen", "flex"}


def test_the_table_is_whole_and_the_most_telling_comes_first():
    names = [cell.name for cell in make_cells(tiny=False)]
    for model in MODELS:
        for rows in ROWS:
            assert {f"products {dtype} {model} {rows} rows" for dtype in ("bf16", "fp8")} <= set(names)
        assert f"head chunked {model}" in names
    for length in LENGTHS:
        assert {f"attention {kind} {length}" for kind in KINDS - {"masked"}} <= set(names)
        assert {f"attention varlen {length} {documents} documents" for documents in (8, 32)} <= set(names)
    assert names[-2:] == [f"attention varlen 8192 8 documents flash {version}" for version in (3, 4)]
    assert names[0] == "attention default 8192" and "square bf16" in names[:3]
    assert sum(cell.estimate_s for cell in make_cells(tiny=False)) < 8 * 60


def test_a_trial_writes_what_a_measurement_would(tmp_path, capsys, has_fp8):
    out = tmp_path / "trial.json"
    arguments = ["--device", "cpu", "--tiny", "--out", str(out), "--only"]
    for part in ("square", "copy", "attention default 64", "attention cudnn 64"):
        assert main([*arguments, part]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["cells"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "square bf16": "measured",
        "square fp8": "measured" if has_fp8 else "absent",
        "copy": "measured",
        "attention default 64": "measured",
        "attention default 64 smollm3-3b": "measured",
        "attention cudnn 64": "absent",
    }
    assert rows["attention default 64"]["result"]["kernels"] and rows["square fp8"]["settings"]["dtype"] == "fp8"
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed and "attention cudnn 64" in printed


def test_another_flash_attention_is_measured_where_it_is_installed(monkeypatch):
    (cell,) = [cell for cell in make_cells(tiny=True) if cell.name.endswith("flash 3")]
    with pytest.raises(Absent, match=r"FlashAttention 3: it runs on NVIDIA's GPUs alone"):
        cell.measure(torch.device("cpu"))
    monkeypatch.setattr("ground_truth.cuda_capability", lambda device: (9, 0))
    with pytest.raises(Absent, match=r"its package flash_attn_interface is not installed"):
        cell.measure(torch.device("cpu"))
    monkeypatch.setattr("ground_truth.has_package", lambda version: True)
    kernel = Kernel()
    with flash_on_cpu(FA3=kernel):
        assert {"forward", "backward", "tflops"} <= set(cell.measure(torch.device("cpu")))
        assert current_flash_attention_impl() is None
    assert {"forward", "backward"} == set(kernel.calls)


def measured(tflops, dtype="bf16"):
    return {
        "status": "measured",
        "settings": {"dtype": dtype},
        "result": {"separate": {"tflops": tflops}, "tflops": 1.0},
    }


def test_what_is_faster_than_the_card_is_marked(tmp_path):
    run = {"date": "1", "device": "NVIDIA H200", "torch": "2.13", "device_type": "cuda", "trial": False}
    book = Book(tmp_path / "gpu.json", "ground_truth", run)
    book.add({"name": "square bf16", **measured(1.0), "result": {"tflops": 790.0}})
    book.add({"name": "products bf16 fine", **measured(800.0)})
    book.add({"name": "products bf16 above the square", **measured(820.0)})
    book.add({"name": "attention above the peak", **measured(1100.0)})
    book.add({"name": "products fp8 fine", **measured(1400.0, "fp8")})
    first, second = marks(book)
    assert "above the square separate: 820 TFLOP/s is above the square product (814)" in first
    assert "above the peak separate: 1100 TFLOP/s is above the peak (989)" in second
    unknown = Book(tmp_path / "other.json", "ground_truth", run | {"device": "some card"})
    unknown.add({"name": "attention", **measured(5000.0)})
    assert marks(unknown) == []
