"""The check of a GPU's gradients: a trial is right on a CPU, and a wrong kernel is seen."""

import json

import gradients
import torch
from gradients import FORMS, MODELS, main, make_cells

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
