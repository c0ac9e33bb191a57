"""One pool of gloo ranks for the whole session: torch is imported once, and every multi-rank case reuses the ranks."""

import os
import signal
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests import long_sample
from tests.stores import s3_place, s3_session  # noqa: F401
from windlass import safe_text

START_S = time.monotonic()

# nohup, and a shell's &, ignore these for the tests and for every process that they start; no test is about that by chance
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


LONG = "long: runs in `make test-all`"
SKIPS_THAT_PASS = (
    LONG,
    "root reads everything",
    "this CPU has no fp8 products",
    "no podman or docker that works",  # needs a daemon, or rights that a container does not have
    "says what happens without a GPU",
    "nothing is left of this family",  # of what a fuzzed config draws
)
"""Reasons that nothing can be installed for: `--no-skips` lets them pass."""


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long matrices too (make test-all)")
    parser.addoption(
        "--long-sample", type=float, metavar="SECONDS", help="run only long tests, a sample of these seconds"
    )
    parser.addoption("--seed", default="", help="what --long-sample is drawn by")
    parser.addoption(
        "--kills",
        type=int,
        metavar="N",
        help="kill each step of a preparation in parts at N calls alone, not at all of them",
    )
    parser.addoption(
        "--share", metavar="K/N", help="run the K-th of N pieces of the tests, 1/N the first, in their order"
    )
    parser.addoption("--stop-after", type=float, metavar="SECONDS", help="skip the tests that would begin later")
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped for want of something fails")
    parser.addoption("--record-seconds", metavar="FILE", help="write the seconds of long tests there")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--share"):  # of those that -m has left
        piece, pieces = map(int, config.getoption("--share").split("/"))
        first, end = (len(items) * number // pieces for number in (piece - 1, piece))
        config.hook.pytest_deselected(items=items[:first] + items[end:])
        items[:] = items[first:end]
    budget_s = config.getoption("--long-sample")
    if budget_s is not None:
        long = {item.nodeid: item for item in items if item.get_closest_marker("long")}
        chosen = set(long_sample.sample(long, long_sample.read_seconds(), budget_s, config.getoption("--seed")))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
        return
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason=LONG)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)


def pytest_runtest_setup(item):
    stop_s = item.config.getoption("--stop-after")
    if stop_s is not None and time.monotonic() - START_S > stop_s:
        pytest.skip(f"not run: {stop_s:g} s were over (--stop-after)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPS_THAT_PASS):
            report.outcome, report.longrepr = "failed", f"skipped, with --no-skips: {reason}"
    return report


def pytest_terminal_summary(terminalreporter, config):
    record = config.getoption("--record-seconds")
    if record:
        reports = (report for kind in ("passed", "") for report in terminalreporter.stats.get(kind, ()))
        long_sample.write_seconds(((r.nodeid, r.duration) for r in reports if "long" in r.keywords), Path(record))


@pytest.fixture(autouse=True)
def forgotten_secrets():
    """What one test's `${NAME}` hides in URLs would be hidden in the next one's."""
    yield
    safe_text._VALUES.clear()


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(world, function, *args)` runs an importable function on `world` gloo ranks; returns one result per rank."""
    from windlass.proof.pool import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory, ranks):
    """The directory of a finished run on two ranks, with a checkpoint at step 0 too: trained once for all that read it back."""
    from tests import tiny

    config = tiny.recipe(tmp_path_factory.mktemp("saved"), "run", checkpoint={"keep_steps": [0]})
    ranks.run(2, tiny.train, config)
    return config.run.directory


@pytest.fixture(scope="session")
def exported(run):
    from windlass.commands.models.export import export

    return export(run)
