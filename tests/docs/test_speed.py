"""docs/flops.md, performance.md, howto/advise.md and bench.md: their tables are filled, their numbers are the code's."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from tests.advice.test_facts import FACTS
from tests.advice.test_observed import SETTINGS, start, step, written
from tests.docs.pages import commands_in, run_commands
from windlass.advice import levers
from windlass.cli import runs
from windlass.commands.speed import bench
from windlass.commands.speed.advise import advise
from windlass.config import load_recipe

DOCS = Path(__file__).parents[2] / "docs"
FLOPS, PERFORMANCE, ADVISE, BENCH = (
    (DOCS / name).read_text("utf-8") for name in ("flops.md", "performance.md", "howto/advise.md", "howto/bench.md")
)


@pytest.fixture
def fill(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "generate"))
    import fill

    yield fill
    for name in ("fill", "speed"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["flops.md", "performance.md", "howto/watch-a-run.md"])
def test_every_place_is_filled_from_the_code(fill, name):
    assert (DOCS / name).read_text("utf-8") == fill.filled(DOCS / name), "run `make docs`"


def test_smollm3_at_8192_is_counted_as_published_counts_are_corrected():
    cells = dict(re.findall(r"^\| \**([^|*]+?)\** \|.*\| \**([\d.]+)\** \|$", FLOPS, re.M))
    assert cells["all matrices"] == "18.45"
    assert cells["PaLM: matrices and full attention"] == "25.70"
    assert cells["causal: matrices and half of attention"] == "22.07"


def test_two_reports_are_counted_again():
    assert "| its formula, with the model's true sizes | 25.48 | +15.4% |" in FLOPS
    assert "+1.36, full attention +3.62, head left out -1.58 GFLOP" in FLOPS
    assert "is 18.8% by the causal count" in FLOPS and "36 of 156 MB, 5.6 GB per pass" in FLOPS
    for printed, again, true in (("1.8804", "1.88", "2.89"), ("1.4066", "1.41", "2.16")):
        assert f"| {printed} % | {again} % | {true} % |" in FLOPS


def test_the_table_of_layouts_has_every_cell():
    rows = re.findall(r"^\| (DDP|ZeRO-2|ZeRO-3|HSDP), (none|selective|full) \|", PERFORMANCE, re.M)
    assert len(set(rows)) == 12


def test_every_setting_that_the_pages_name_is_one():
    named = re.findall(r"`((?:run|data|parallel|report|precision)\.\w+)", FLOPS + PERFORMANCE + ADVISE)
    config = load_recipe("demo")
    assert named and not [key for key in named if not hasattr(getattr(config, key.split(".")[0]), key.split(".")[1])]


def test_what_the_page_shows_is_what_is_printed(tmp_path):
    facts = {**FACTS.to_event(), "ranks": 1, "filled": 0.67, "layout": {}, "accumulation": 1}
    ledger = {"warm_up": 1.2, "training": 0.2, "data_wait": 2.6}
    late = {"data_wait_s": 0.201, "log_s": 0.0065, "ledger": ledger}
    events = start(facts=facts, derived={"of the script": "source Slow"}), step(1, 9.0, True), step(14, 0.215, **late)
    settings = {
        **SETTINGS,
        "run": {"micro_batch": 2, "tokens_per_step": 256},
        "parallel": {"zero": 0, "bucket_mib": 25.0},
    }
    printed = list(advise(written(tmp_path, *events, settings=settings)))
    shown = [line[4:] for line in re.findall(r"^    .*$", ADVISE, re.M) if not line.startswith("    windlass")]
    assert [line for line in printed if line and not line.startswith("  at ")] == shown
    assert commands_in(ADVISE) == ["advise runs/mine"]


def test_the_rates_of_estimates_are_those_of_the_code():
    words = (
        f"{1e6 * levers.GPU_CALL_S:.0f} µs a call and {levers.NVLINK_BYTES_S / 1e9:.0f} GB/s between the GPUs of a host"
    )
    assert words in ADVISE and f"{levers.NETWORK_BYTES_S / 1e9:.0f} GB/s between hosts" in ADVISE
    cpu = levers.CPU
    assert f"{1e6 * cpu.call_s:.0f} µs, {cpu.link_bytes_s / 1e9:.0f} GB/s and {cpu.flops / 1e9:.0f} GFLOP/s" in ADVISE


def test_the_page_on_bench_has_its_options_with_their_defaults_and_its_commands_parse(monkeypatch, capsys, tmp_path):
    options = {option.name: option for option in inspect.signature(runs.bench).parameters.values()}
    shown = dict(re.findall(r"^\| `--(\w+) ([^`]+)` \|", BENCH, re.M))
    assert set(shown) == set(options) - {"recipe", "overrides"}
    assert {name: shown[name] for name in ("steps", "repeats", "output")} == {
        name: str(options[name].default) for name in ("steps", "repeats", "output")
    }
    assert f"Below {bench.LEAST_EFFICIENCY:.2f} `bench` prints a warning" in BENCH
    given = []
    monkeypatch.setattr(bench, "bench", lambda *arguments: given.append(arguments) or [])
    run_commands(commands_in(BENCH), {}, tmp_path, monkeypatch, capsys)
    assert [(one[2], one[3]) for one in given] == [
        (["run.micro_batch=1,2,4", "parallel.recompute=none,selective,full"], [1]), ([], [1, 2, 4, 8]),
    ]  # fmt: skip
