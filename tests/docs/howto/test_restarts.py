"""docs/howto/restarts.md: its settings are the defaults, and what it shows is what is printed."""

import re
from pathlib import Path

import yaml

from tests.docs.pages import commands_in, recipe_in
from windlass.launch.config import LaunchConfig
from windlass.supervise.heartbeat import LastBeat
from windlass.supervise.incident import OUT_OF_MEMORY, Incident
from windlass.supervise.rank_stacks import Collective, RankStack
from windlass.supervise.resident import HostMemory

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "howto" / "restarts.md").read_text("utf-8")


def test_the_settings_are_the_defaults():
    assert yaml.safe_load(recipe_in(PAGE)) == {
        "launch": LaunchConfig().model_dump(exclude={"slurm", "kubernetes", "flyte", "sky"})
    }


def test_what_it_shows_is_what_is_printed():
    died = Incident("died", [1], 66, "step", exit_code=-9)
    alone, gib = Incident("died", [3], 66, "step"), 1 << 30
    held = [HostMemory(1, int(10.9 * gib), 48 << 20, int(0.3 * gib), int(11.4 * gib))]
    assert f"`windlass: {alone.sentence}`" in PAGE
    in_one_line = " ".join(PAGE.split())
    assert str(held[0]) in in_one_line and OUT_OF_MEMORY.strip("; ") in in_one_line
    frames = (
        "torch/distributed/distributed_c10d.py:4394 all_gather_single",
        "windlass/model/transformer.py:249 forward",
    )
    gathering = (Collective("0", 694, "gloo:all_gather", False),)
    waits = RankStack(LastBeat(21980, 0, 185, 0, 0.0, "step"), 214.0, frames, gathering, memory_gib=0.5)
    stopped = RankStack(LastBeat(21981, 1, 185, 0, 0.0, "step"), 214.0, state="stopped (SIGSTOP)", memory_gib=0.5)
    stalled = Incident("stalled", [1], 185, "step", waited_s=214.0, stacks=[waits, stopped])
    for incident in (died, stalled):
        lines = [f"windlass: {incident.sentence}", *incident.details()]
        assert (
            "\n".join(f"    {line}" for line in lines) + "\n    windlass: restart 1 of 3, from the last commit" in PAGE
        )


def test_the_commands_are_those_that_look_at_a_run():
    assert [command.split()[0] for command in commands_in(PAGE)] == ["status", "stacks"]


def test_every_command_that_shows_something_selects_tests():
    commands = re.findall(r"^\| `(tests/\S+?)(?: -k (\w+))?` \|", PAGE, re.M)
    assert len(commands) == 8
    for file, word in commands:
        names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text("utf-8"), re.M)
        assert [name for name in names if word in name], (file, word)
