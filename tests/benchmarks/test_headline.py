"""Headline rows: the settings that are tried, in their order, and a trial of one model."""

import json

import torch
from headline import ROWS, main, make_cells, setups_of
from step import Setup


def row(preset):
    return next(row for row in ROWS if row.preset == preset)


def test_the_bars_are_beside_their_models():
    bars = {row.preset: (row.sequence_length, row.bar, row.goal) for row in ROWS}
    assert bars["smollm3-3b"] == (8192, 24_600, 29_100) and bars["llama-3.1-8b"] == (4096, 12_000, 13_300)
    assert list(bars) == ["smollm3-3b", "llama-3.1-8b", "qwen3-4b", "qwen2.5-1.5b"]


def test_the_fastest_settings_are_tried_first():
    setups = setups_of(row("qwen3-4b"), tiny=False)
    tried = [(setup.recompute, setup.micro_batch) for setup in setups]
    assert tried == [("none", 4), ("selective", 4), ("none", 2), ("selective", 2), ("full", 4), ("full", 2)]
    assert all(setup.tokens_per_step == 65536 and setup.compile and setup.states == "fp32" for setup in setups)


def test_8b_falls_back_to_weights_in_bf16_last():
    setups = setups_of(row("llama-3.1-8b"), tiny=False)
    assert [setup.policy for setup in setups] == ["bf16"] * 6 + ["bf16-pure"] * 6
    assert {setup.states for setup in setups} == {"bf16"}


def test_the_models_come_before_the_other_layouts_and_fit_the_time():
    cells = make_cells(tiny=False)
    assert [cell.name for cell in cells[:4]] == [row.preset for row in ROWS]
    assert sum(cell.estimate_s for cell in cells[:4]) < 8 * 60


def test_a_trial_shows_the_bars_and_no_mfu(tmp_path, capsys, monkeypatch):
    import headline

    monkeypatch.setattr(headline, "SECONDS", 0.1)
    original = headline.setups_of

    def eager(row, tiny):
        return [headline.replace(setup, compile=False) for setup in original(row, tiny)]

    monkeypatch.setattr(headline, "setups_of", eager)
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out), "--only", "qwen3-4b"]) == 0
    found, *adapted = json.loads(out.read_text())["cells"]
    assert [one["name"] for one in adapted] == ["qwen3-4b, LoRA", "qwen3-4b, QLoRA"]
    assert all(one["result"]["loss"][1] < one["result"]["loss"][0] for one in adapted)
    assert found["result"]["mfu_causal"] is None and found["settings"]["budget_s"] > 80
    rates = [rate for _, rate in found["result"]["candidates"] if isinstance(rate, float)]
    assert len(found["result"]["candidates"]) == 6 and rates and found["result"]["tokens_per_s"] == max(rates)
    printed = capsys.readouterr().out
    assert "24,600" in printed and "12,000" in printed


def test_a_trial_measures_every_candidate_of_a_model_that_may_be_the_fastest(tmp_path, monkeypatch):
    import headline

    original = headline.setups_of
    eager = [headline.replace(setup, compile=False) for setup in original(row("qwen2.5-1.5b"), tiny=True)]
    monkeypatch.setattr(headline, "setups_of", lambda _row, _tiny: eager)
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out), "--only", "qwen2.5-1.5b$"]) == 0
    (found,) = json.loads(out.read_text())["cells"]
    rates = {
        (s["recompute"], s["micro_batch"]): rate for s, rate in found["result"]["candidates"] if isinstance(rate, float)
    }
    assert list(rates) == [("none", 4), ("none", 8)], (
        "64 tokens a sequence: the large one is measured last, as on a GPU"
    )
    kept = found["result"]["setup"]
    assert found["result"]["tokens_per_s"] == max(rates.values()) == rates[kept["recompute"], kept["micro_batch"]]


def test_every_setting_of_both_scripts_is_one_that_windlass_takes():
    import ladder

    from windlass.parallel.config import ParallelConfig

    setups = [setup for row in ROWS for setup in setups_of(row, tiny=False)]
    setups += [setup for rung in ladder.rungs(tiny=False).values() for setup in rung]
    setups += [Setup(**given) for cell in make_cells(tiny=False) for given in cell.settings["setups"]]
    assert len(setups) > 100
    for setup in setups:
        ParallelConfig(recompute=setup.recompute, compile=setup.compile)
        rounds = setup.storage().is_rounded(torch.bfloat16 if setup.policy == "bf16-pure" else torch.float32)
        assert rounds == (setup.states == "bf16") and setup.work().states == setup.states
        assert setup.storage().stochastic == (rounds and setup.rounding != "nearest")
        assert setup.sequences_per_step % setup.micro_batch == 0
