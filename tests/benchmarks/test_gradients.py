"""The check of a GPU's gradients: a trial is right on a CPU, and a wrong kernel is seen."""

import json

import gradients
import torch
from gradients import DETERMINISTIC, FORMS, MODELS, main, make_cells

from windlass.model import moe


def trial(tmp_path, only):
    out = tmp_path / f"{only.replace(' ', '-')}.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out), "--only", only]) == 0
    return {row["name"]: row["result"] for row in json.loads(out.read_text())["cells"]}


def test_each_model_is_run_in_each_form():
    assert len(make_cells(tiny=False)) == len(MODELS) * len(FORMS)


def test_a_cpu_is_right_and_gives_the_same_bits_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradients, "FORMS", {"bf16": FORMS["bf16"]})
    for name, found in trial(tmp_path, "bf16").items():
        assert found["worst"] < 0.2 and found["median"] < 0.1 and abs(found["loss"]) < 1e-2, name
        assert found["differ"] == [] and found["tensors"] > 20
    assert "qwen3_moe bf16" in capsys.readouterr().out


def test_bits_that_differ_are_named_and_the_deterministic_form_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "FORMS", {"bf16": FORMS["bf16"], DETERMINISTIC: {"compile": False}})
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    original, asked, calls = gradients.first_step, [], []

    def restless(setup, device):
        loss, found = original(setup, device)
        asked.append(torch.are_deterministic_algorithms_enabled())
        calls.append(1)
        found["model.norm.weight"] += 1e-9 * len(calls) if not asked[-1] else 0
        return loss, found

    monkeypatch.setattr(gradients, "first_step", restless)
    found = trial(tmp_path, "qwen3 bf16")
    assert {name: row["differ"] for name, row in found.items()} == {
        "qwen3 bf16": ["model.norm.weight"],
        f"qwen3 {DETERMINISTIC}": [],
    }
    assert asked == [False, False, False, False, True, True], "fp32's step is not part of it"


def test_a_product_of_experts_with_a_wrong_gradient_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "FORMS", {"bf16": FORMS["bf16"]})
    right = torch.nn.functional.grouped_mm

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 100 * grad

    def wrong(x, matrices, offs):
        return right(Wrong.apply(x), matrices, offs=offs)

    monkeypatch.setattr(moe.functional, "grouped_mm", wrong)
    found = trial(tmp_path, "qwen3_moe bf16")["qwen3_moe bf16"]
    assert found["worst"] > 5 and abs(found["loss"]) < 1e-2, "the loss does not show it"
