"""docs/howto/profile.md: what it shows is what is printed, and its files are those that are written."""

import re
from pathlib import Path

from tests.docs.pages import commands_in
from windlass.commands.profile import as_text
from windlass.profiling.summary import SUMMARY, OperatorTime, Summary, Traffic

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "profile.md").read_text()
MIB = 1 << 20
SHOWN = Summary(
    rank=0, first_step=1025, last_step=1029, device="CPU", step_s=0.47875, computing_s=0.28317, communicating_s=0.08614,
    hidden_s=0.00867, idle_s=0.11811,
    kinds=(
        OperatorTime("matrix products", 0.13098, 584), OperatorTime("attention", 0.06868, 48),
        OperatorTime("elementwise and reductions", 0.0419, 1947),
    ),
    operators=(),
    traffic=(
        Traffic("fsdp", "all-gather", 36, 24 * MIB, 0.04492), Traffic("fsdp", "all-reduce", 21, 14 * MIB, 0.0391),
        Traffic("loss", "all-reduce", 2, 12, 0.00212),
    ),
)  # fmt: skip


def test_what_it_shows_is_what_is_printed():
    printed = [
        line for line in as_text(SHOWN, Path("x")) if line not in ("", "longest operators") and "trace" not in line
    ]
    shown = [line[4:] for line in re.findall(r"^    .*$", PAGE, re.M) if "windlass" not in line]
    assert printed == shown


def test_its_command_and_its_files_are_those_of_the_code():
    assert commands_in(PAGE) == ["profile runs/demo --steps 5"]
    assert f"`{SUMMARY}`" in PAGE
    recorder = (Path(__file__).parents[3] / "src/windlass/profiling/recorder.py").read_text()
    for file in ("trace.json.gz", "memory.pickle", "collectives.json"):
        assert f"| `{file}`" in PAGE and f'"{file}"' in recorder
