"""The wheel: built from this checkout, it works in an environment that cannot see the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

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
print(write_report(Path("run")).stat().st_size > 1_000_000)
"""


def run(command, **settings):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_wheel_holds_recipes_and_page_and_works_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path])
    (wheel,) = tmp_path.glob("windlass-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"windlass/recipes/demo.yaml", "windlass/report/page/page.html.j2", "windlass/report/page/page.js"} <= set(
        names
    )
    assert not [name for name in names if name.startswith("tests/")]

    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # what windlass depends on is borrowed from here; its own editable install stays out, since .pth files of a
    # directory on PYTHONPATH are not read
    ours = run([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ours}
    assert Path(site, "windlass", "recipes", "demo.yaml").is_file()
    told = run([python, "-c", PROGRAM], cwd=tmp_path, env=environment)
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert f"{recipes} 7" in told and "True" in told
    assert "train" in run([tmp_path / "venv" / "bin" / "windlass", "--help"], cwd=tmp_path, env=environment)
