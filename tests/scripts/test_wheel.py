"""The wheel: built from this checkout, it works in an environment that cannot see the checkout."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROGRAM = """
import windlass, sys
from pathlib import Path
from windlass.config import load_recipe
from windlass.recipe import shipped_recipes
from windlass.report.events import EventLog
from windlass.report.page.write import write_report
assert Path(windlass.__file__).is_relative_to(sys.prefix), windlass.__file__
print(sorted(shipped_recipes()), load_recipe("demo", "run.seed=7").run.seed)
EventLog(Path("run/events.jsonl")).write("start", 0, {})
print(write_report(Path("run")).stat().st_size < 300_000)
"""


def run(command, **settings):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, and `call(program, *arguments)` of the environment that it is installed in."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", directory])
    (wheel,) = directory.glob("windlass_lm-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"])
    programs = directory / "venv" / "bin"
    run([*pip, "--python", programs / "python", "install", "--no-deps", "--no-index", wheel])
    # what windlass depends on is borrowed from here; its own editable install stays out, since a .pth file in a directory
    # that a .pth file names is not read
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours, theirs = (run([python, "-c", purelib]).strip() for python in (sys.executable, programs / "python"))
    Path(theirs, "borrowed.pth").write_text(ours)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def call(program, *arguments):
        return run([programs / program, *arguments], cwd=directory, env=environment)

    return wheel, call


def test_an_installed_wheel_holds_recipes_and_page_and_works_outside_the_checkout(installed):
    wheel, call = installed
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "windlass/recipes/demo.yaml",
        "windlass/report/page/page.html.j2",
        "windlass/report/page/page.js",
        "windlass/report/page/parts.html.j2",
    } <= set(names)
    assert not [name for name in names if name.startswith("tests/")]
    site = call("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    assert Path(site, "windlass", "recipes", "demo.yaml").is_file()
    logged = call("python", "-c", PROGRAM)
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert f"{recipes} 7" in logged and "True" in logged
    assert "train" in call("windlass", "--help")


PARTS = {  # what another package asks for by itself, and offers as its own: datasets asks for fsspec[http]
    "annotated_types": "pydantic",
    "pydantic_core": "pydantic",
    "aiohttp": "datasets",
    "flyteplugins": "flyteplugins-pytorch",
}


def test_every_package_that_the_source_imports_is_one_that_pip_brings():
    """Also what only one command needs, and what another package happens to bring today."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra, names in project["optional-dependencies"].items() if extra != "dev" for name in names]
    asked = {Requirement(text).name.lower() for text in (*project["dependencies"], *extras)}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in named} - sys.stdlib_module_names - {"windlass"}
    packages = importlib.metadata.packages_distributions()  # not of an extra that is not installed
    found = {root: [PARTS[root]] if root in PARTS else packages.get(root, [root]) for root in roots}
    missing = {root for root, names in found.items() if not asked & {name.lower().replace("_", "-") for name in names}}
    assert len(roots) > 15 and missing == set()


TYPED = """
from collections.abc import Mapping
from pathlib import Path

from windlass import (
    Sampling, Stopped, UserError, evaluate, export, fingerprint, generate, load_recipe, parse_recipe, prepare, train, verify,
)

recipe = load_recipe(Path("recipe.yaml"), "run.steps=20")
same: bool = parse_recipe("run: {}", "recipe.yaml", "run.steps=20") == recipe
digits: str = fingerprint(recipe)
tokens: int = prepare(recipe).sets["train"].tokens
steps: int | None = recipe.run.steps


def heard(line: dict[str, object]) -> None:
    print(line["kind"])


def halves(done: int, steps: int) -> float:
    return 0.5 ** done


class Sink:
    def numbers(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


try:
    result = train(recipe, schedule=halves, sinks=[Sink()], on_event=heard, raise_on_stop=True)
    place: Path = result.directory
    step: int = result.step
except Stopped as stopped:
    given: str = stopped.given
except UserError as error:
    change: str = error.change
losses: list[float] = [score.loss for score in evaluate("runs/mine", step=20, sequences=8)]
texts: list[str] = generate("runs/mine", ["wind"], Sampling(max_tokens=8, temperature=0))
difference: float = export("runs/mine", "exported").largest_difference
agrees: bool = verify("recipe.yaml", ["run.steps=3"], nproc=2)
"""
WRONG = {  # a line of a user's -> what mypy says of it
    "from windlass import trian": "attr-defined",
    "windlass.train('recipe.yaml')": "arg-type",
    "windlass.train(recipe).steps": "attr-defined",
    "windlass.train(recipe, on_events=print)": "call-arg",
    "windlass.train(recipe, schedule=len)": "arg-type",
    "windlass.train(recipe, sinks=['wandb'])": "list-item",
    "windlass.prepare('recipe.yaml')": "arg-type",
    "windlass.fingerprint({})": "arg-type",
    "windlass.load_recipe({'run': {}})": "arg-type",
    "windlass.parse_recipe(None)": "arg-type",
    "windlass.evaluate(recipe)": "arg-type",
    "windlass.evaluate('runs/mine')[0].perplexity + 1": "operator",
    "windlass.generate('runs/mine', ['a'], max_tokens=3)": "call-arg",
    "windlass.Sampling(max_token=3)": "call-arg",
    "windlass.export('runs/mine', dtype=16)": "arg-type",
    "windlass.verify(recipe)": "arg-type",
    "recipe.run.step": "attr-defined",
}


@pytest.mark.long
def test_a_users_script_is_checked_against_the_types_of_the_installed_package(installed, tmp_path):
    """mypy --strict finds nothing in a script with every function of the door, and one error in each wrong line."""
    _, call = installed
    assert (
        call(
            "python",
            "-c",
            "import windlass, pathlib; print((pathlib.Path(windlass.__file__).parent / 'py.typed').exists())",
        )
        == "True\n"
    )
    (tmp_path / "right.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(
        "import windlass\nrecipe = windlass.load_recipe('recipe.yaml')\n" + "\n".join(WRONG) + "\n"
    )
    programs = call("python", "-c", "import sys; print(sys.prefix)").strip()
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        f"{programs}/bin/python",
        "right.py",
        "wrong.py",
    ]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\w+)\.py:(\d+): error: .* \[([\w-]+)\]$", done.stdout, re.M)
    wanted = [("wrong", str(number), code) for number, code in enumerate(WRONG.values(), 3)]
    assert found == wanted, done.stdout + done.stderr


@pytest.mark.long
def test_pip_brings_all_that_the_demo_needs(installed, tmp_path):
    """The wheel in an environment of its own, its dependencies chosen by pip, in the versions of the lock; no extra is there."""
    wheel, _ = installed
    run([sys.executable, "-m", "venv", tmp_path / "venv"])
    programs = tmp_path / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    run([*pip, "install", "--quiet", "--constraint", ROOT / "requirements.lock", wheel])
    place = tmp_path / "elsewhere"
    place.mkdir()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(place), "OMP_NUM_THREADS": "1"}

    def call(program, *arguments):
        return run([programs / program, *arguments], cwd=place, env=environment)

    assert call("python", "-m", "pip", "check") == "No broken requirements found.\n"
    names = {line.partition("==")[0].lower() for line in call("python", "-m", "pip", "freeze").splitlines()}
    assert {"torch", "transformers"} <= names and not names & {"pytest", "peft", "tensorboard", "tiktoken", "s3fs"}
    given = ["run.steps=4", "optim.warmup_steps=1", "evaluate.every_steps=4"]
    assert "finished at step 4 of 4" in call("windlass", "train", "demo", "--nproc", "2", *given)
    assert "class" in call("windlass", "generate", "runs/demo", "--prompt", "class Reader:", "--max-tokens", "4")
    assert "logits" in call("windlass", "export", "runs/demo")
    assert "report.html" in call("windlass", "report", "runs/demo")
    assert {file.name for file in (place / "runs/demo/export").iterdir()} >= {"config.json", "model.safetensors"}
