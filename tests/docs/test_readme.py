"""README's recipe is one, its first commands run as they are written, and those that show its claims name tests that exist."""

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from tests import tiny
from tests.commands.command_line import run_command
from tests.commands.recipes.test_new_recipe import ROWS, write_texts
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.cli import main as cli
from windlass.config import load_recipe, to_yaml
from windlass.launch.nodes import nodes_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLAIMS = (ROOT / "docs" / "claims.md").read_text()


def test_the_recipe_of_the_readme_loads(tmp_path):
    (block,) = (part for part in re.findall(r"(?:^    .*\n|^\n)+", README, re.M) if "\n    model: " in part)
    (tmp_path / "readme.yaml").write_text(textwrap.dedent(block))
    recipe = load_recipe(tmp_path / "readme.yaml")
    assert len(recipe.data.sources) == 2 and recipe.data.isolate


@pytest.mark.parametrize(("page", "number"), [("README.md", 11), ("docs/howto/install.md", 3)])
def test_the_recipe_of_every_train_and_init_loads(page, number, tmp_path, monkeypatch, capsys):
    """With its overrides, as it is written: `windlass train demo run.steps=20` was refused."""
    text = (ROOT / page).read_text()
    commands = re.findall(r"windlass (train|init) ([^`#\n]+)", text)
    assert len(commands) == number
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts", 20)
    for name, kind in (("chats", "sft"), ("pairs", "dpo")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[kind]))
    if "```yaml" in text:
        (tmp_path / "recipe.yaml").write_text(recipe_in(text))
    for command, given in sorted(commands):  # init writes what train reads
        words = shlex.split(given)
        if command == "init":
            code, done = run_command(["init", *words], monkeypatch, capsys)
            assert code == 0, (given, done.err)
        else:
            assert load_recipe(*(word for word in words if not word.startswith("-"))).data.sources, given


def test_files_that_the_readme_names_exist():
    named = re.findall(r"(?:tests|benchmarks|scripts|recipes|docs|src)/[\w./-]+\w", README + CLAIMS)
    assert len(named) > 60
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_claims_of_the_readme_are_some_of_all():
    rows = [line for line in section("What is claimed, and the command that shows it").splitlines() if " | `" in line]
    assert len(rows) == 10 and all(row in CLAIMS.splitlines() for row in rows)


def test_what_a_claims_command_selects_by_is_in_its_tests():
    commands = re.findall(r"`(pytest [^`]*tests[^`]+)`", CLAIMS)
    assert len(commands) > 30
    for command in commands:
        paths, _, words = command.removeprefix("pytest ").removeprefix("--long ").partition(" -k ")
        folders = [path if (path := ROOT / name).is_dir() else path.parent for name in paths.split()]
        assert all((ROOT / name).exists() for name in paths.split()), command
        text = "".join(f"{path}{path.read_text()}" for folder in folders for path in folder.rglob("*.py")).lower()
        assert text and all(word in text for word in words.strip('"').split(" or ")), command


def test_the_rates_of_one_h200_are_those_of_the_results_files():
    rows = {}
    for script in ("headline", "peer"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"gpu-{script}.json").read_text())
        rows |= {cell["name"]: cell["result"] for cell in found["cells"] if cell["status"] == "measured"}
    first, beside, trainer, llama, fp8 = (
        rows[name]
        for name in ("smollm3-3b", "smollm3-3b, beside the Trainer", "Trainer", "llama-3.1-8b",
                     "llama-3.1-8b, fp8 tensorwise at 8192")
    )  # fmt: skip
    rates = [f"{row['tokens_per_s']:,.0f}" for row in (first, beside, trainer, llama, fp8)]
    shares = [f"{100 * row['mfu_causal']:.1f} %" for row in (first, llama, fp8)]
    (line,) = [line for line in README.splitlines() if line.startswith("| one H200 trains")]
    assert re.findall(r"\d\d,\d{3}", line) == rates
    assert re.findall(r"\d\d\.\d %", line) == shares


def test_the_map_names_every_room():
    """test_build.py holds the names of the files behind it."""
    source, rows = ROOT / "src/windlass", re.findall(r"^\| (.+?) \| (.+) \|$", section("The map"), re.M)
    named = {room[1:-2]: holds for room, holds in rows if room.startswith("`")}
    rooms = {path.parent.relative_to(source) for path in source.rglob("__init__.py")} - {Path()}
    assert named.keys() == {str(room) for room in rooms if len(room.parts) == 1}
    for outer, inner in (room.parts for room in rooms if len(room.parts) == 2):
        assert f"`{inner}/`" in named[outer], (outer, inner)


def section(title):
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_first_commands_train_and_export_a_model_of_ones_own_text(tmp_path, monkeypatch, capsys):
    commands = commands_in(section("Your own text"))
    assert [command.split()[0] for command in commands] == ["init", "train", "generate", "report", "export"]
    write_texts(tmp_path / "texts", 20)
    run_commands(commands[:1], None, tmp_path, monkeypatch, capsys)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 1000", "steps: 2"))
    run_commands(commands[1:], None, tmp_path, monkeypatch, capsys)
    assert "finished at step 2 of 2" in capsys.readouterr().out
    assert {"report.html", "export"} <= {path.name for path in (tmp_path / "runs/recipe").iterdir()}


def test_a_run_on_chats_is_asked_in_the_chat_template():
    """Without --chat it writes an empty line, or nonsense."""
    commands = commands_in(section("Finetune"))
    (train,) = (shlex.split(one) for one in commands if one.startswith("train"))
    (asked,) = (shlex.split(one) for one in commands if one.startswith("generate"))
    assert asked[1] == f"runs/{Path(train[1]).stem}" and "--chat" in asked and "--prompt" in asked


def test_the_table_of_commands_names_each_one():
    rows = re.findall(r"^\| (`.+?) \|", section("Commands"), re.M)
    named = {name for row in rows for shown in re.findall(r"`([^`]+)`", row) for name in shown.split()[:1]}
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} <= named
    assert {group.name for group in cli.app.registered_groups} <= named


def test_the_readme_goes_from_what_it_is_to_proof():
    """The first screen is two sentences, a command, a picture and a figure; claims come after everything one does."""
    begin = README.partition("\n## ")[0]
    places = [begin.index(part) for part in ("    windlass train recipe.yaml", "<picture>", "bits per byte")]
    assert places == sorted(places) and len(begin.split("\n\n")[1].split()) < 70
    titles = ["Install", "Your own text", "Finetune", "On a cluster", "Commands", "When another tool fits better"]
    found = re.findall(r"^## (.+)$", README, re.M)
    assert found[: len(titles) + 1] == [*titles, "What is claimed, and the command that shows it"]


def test_its_commands_for_a_cluster_are_taken(tmp_path, monkeypatch, capsys):
    """As they are written: those of several hosts as far as the number of hosts, those of SLURM up to the script."""
    lines = [line.split("#")[0].split() for line in README.splitlines() if line.startswith("    windlass launch")]
    assert [line[2] for line in lines] == ["nodes", "slurm"]
    assert nodes_of(lines[0][lines[0].index("--nodes") + 1]) == (3, 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny.recipe(tmp_path, run={"tokens_per_step": 64 * 16})))
    code, done = run_command(lines[1][1:], monkeypatch, capsys)
    assert code == 0 and "#SBATCH --nodes=4" in done.out, done.err
