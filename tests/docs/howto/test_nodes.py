"""docs/howto/several-nodes.md: its numbers are the code's, and tests/launch/test_nodes_in_namespaces.py runs its command."""

import shlex
from pathlib import Path

from tests.docs.pages import commands_in
from windlass.cli.arguments import endpoint_of
from windlass.launch.nodes import nodes_of
from windlass.launch.rendezvous import GRACE_S, JOIN_S, KEEP_ALIVE_S, KEEP_ALIVES

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "several-nodes.md").read_text()


def test_the_command_and_the_numbers_are_those_of_the_code():
    (command,) = commands_in(PAGE)
    words = shlex.split(command)
    assert words[:3] == ["launch", "nodes", "recipe.yaml"] and words[3::2] == ["--nodes", "--endpoint"]
    assert nodes_of(words[4]) == (3, 3) and endpoint_of(words[6]) == "node-1:29400"
    assert f"after {KEEP_ALIVE_S * KEEP_ALIVES} seconds without a word" in PAGE and JOIN_S == 3600
    assert f"{GRACE_S:.0f} seconds later their ranks end" in PAGE
