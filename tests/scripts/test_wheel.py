"""The wheel: built from this checkout, it works in an environment that cannot see the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    # what windlass depends on is borrowed from here; its own editable install stays out, since .pth files of a
    # directory on PYTHONPATH are not read
    ours = run([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": ours, "OMP_NUM_THREADS": "1"}

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
    told = call("python", "-c", PROGRAM)
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert f"{recipes} 7" in told and "True" in told
    assert "train" in call("windlass", "--help")


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
