"""What a signal does to a process: held, or left by; from its first line on."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from windlass.signals import (
    SIGNALS,
    Signals,
    TooLate,
    catch_signals,
    held_back,
    in_time,
    install_signals,
    signals_of_process,
)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_held_until_a_run_asks_for_it_and_ends_what_has_nothing_to_save(number):
    before = [signal.getsignal(one) for one in SIGNALS]
    with catch_signals() as signals:
        assert signals.received is None and signals_of_process() is signals
        with signals.leaving():
            pass
        send(number)
        assert signals.received == number
        with pytest.raises(KeyboardInterrupt), signals.leaving():
            pytest.fail("a signal that came before ends it at once")
    with catch_signals() as signals, pytest.raises(KeyboardInterrupt), signals.leaving():
        send(number)
        signal.pause()
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_the_second_ctrl_c_does_not_wait():
    with catch_signals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert signals.received == signal.SIGTERM, "a second SIGTERM changes nothing"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_handler_inside_another_is_the_same():
    with catch_signals() as outer, catch_signals() as inner:
        assert inner is outer and install_signals() is outer
    assert signals_of_process() is None


def test_off_the_main_thread_nothing_is_caught_and_that_is_said(capsys):
    caught = []

    def run():
        with catch_signals() as signals:
            caught.append((signals.received, signals_of_process()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert caught == [(None, None)]
    assert capsys.readouterr().out.startswith("signals are not caught: train() does not run on the main thread")


def test_nothing_is_caught_where_the_caller_does_not_want_it():
    with catch_signals(wanted=False) as signals:
        assert signals_of_process() is None and isinstance(signals, Signals)


CHILD = """
import os, signal, sys
{ignored}
from windlass.signals import SIGNALS, install_signals
held = [number.name for number in SIGNALS if number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
pending = sorted(number.name for number in signal.sigpending())
signals = install_signals()
kinds = [getattr(signal.getsignal(number), "name", "ours") for number in SIGNALS]
ready, begun = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(begun, b"x")
    while True:
        signal.pause()
os.read(ready, 1)
os.kill(pid, signal.SIGUSR1)
print(held, pending, signals.received and signals.received.name, kinds, os.waitpid(pid, 0)[1])
"""


def child(ignored="", *signals_at_start):
    """What a process prints that installs the handler: signals held back before, those that waited, the first it received, its
    handlers, and the signal that ended a child that it forked."""
    code = CHILD.format(ignored=ignored)
    if signals_at_start:
        code = (
            f"import os\n[os.kill(os.getpid(), number) for number in {[int(one) for one in signals_at_start]}]\n{code}"
        )
    with held_back():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return process.communicate()[0]


def test_a_signal_before_the_first_line_waits_for_the_handler():
    every = "['SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP']"
    ours = "['ours', 'ours', 'ours', 'ours']"
    assert child() == f"{every} [] None {ours} {int(signal.SIGUSR1)}\n", "a forked child has nothing to save"
    assert child("", signal.SIGUSR1) == f"{every} ['SIGUSR1'] SIGUSR1 {ours} {int(signal.SIGUSR1)}\n"


def test_nohup_and_a_shells_background_keep_what_they_ignore():
    ignored = "[signal.signal(one, signal.SIG_IGN) for one in (1, 2, 10, 15)]"
    assert "['ours', 'SIG_IGN', 'ours', 'SIG_IGN']" in child(ignored)


def test_signals_still_reach_the_process_that_holds_them_back_for_others():
    received = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.set())
    try:
        with held_back():
            assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            send(signal.SIGUSR1)
            while (
                not received.is_set()
            ):  # in short sleeps, as an agent watches its workers: nothing interrupts a long one
                time.sleep(0.01)
        assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR1, before)


WAITS_IN_C = """
import contextlib, ctypes
from windlass import signals

signals.GRACE_S = 0.0
mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
with signals.install_signals().leaving(lambda: 75):
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # where the signal comes before the wait
            print("inside", flush=True)
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second call waits for ever, and no signal interrupts it
"""


def test_a_main_thread_that_waits_in_c_is_ended_before_the_first_step():
    with subprocess.Popen([sys.executable, "-c", WAITS_IN_C], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "inside\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 75


def test_leaving_before_the_first_step_costs_nothing_where_no_signal_comes():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with catch_signals() as signals:
        with signals.leaving(lambda: pytest.fail("no signal came")):
            threads = {thread.name for thread in threading.enumerate()}
        assert "hears-signals" in threads and signal.set_wakeup_fd(before) == before
    assert "hears-signals" not in {thread.name for thread in threading.enumerate()}


INTERRUPTED_IN_C = """
import ctypes
from windlass.signals import install_signals
run = ctypes.pythonapi.PyRun_String  # as libraries do while they are imported
run.restype, run.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]
try:
    with install_signals().leaving():
        run(b"import signal; signal.raise_signal(signal.SIGTERM); signal.pause()", 257, globals(), globals())
except KeyboardInterrupt:
    raise SystemExit(75)
"""


def test_the_exit_code_is_ours_wherever_the_signal_came(tmp_path):
    (tmp_path / "interrupted_in_c.py").write_text(INTERRUPTED_IN_C)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "interrupted_in_c"], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 75


class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGHUP)
        sum(range(10))


def test_a_signal_in_a_destructor_ends_what_has_nothing_to_save_too(capsys):
    """Python drops what a destructor raises, and prints that."""
    hook = sys.unraisablehook
    with catch_signals() as signals, pytest.raises(KeyboardInterrupt), signals.leaving():
        held = [Interrupted()]
        held.clear()
        signal.pause()
    assert signals.received == signal.SIGHUP and capsys.readouterr().err == "" and sys.unraisablehook is hook


FAILS = """
import atexit, sys
from windlass.__main__ import main
atexit.register(print, "Python's own end")
sys.argv = ["windlass", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("ranks", "said"), [("1", "Python's own end\n"), ("2", "")])
@pytest.mark.parametrize("arguments", [["train", "absent.yaml"], ["train", "--no-such-option"]])
def test_a_rank_of_several_that_failed_does_not_wait_for_what_ends_with_it(tmp_path, ranks, said, arguments):
    world = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FAILS, *arguments],
        cwd=tmp_path,
        env={**os.environ, **world},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout.endswith(said or "127.0.0.1:1\n"), done
    assert "Python's own end" not in done.stdout or said
    assert arguments[1] in done.stderr and "Traceback" not in done.stderr


LATE = """
import os, sys
from windlass.__main__ import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)

late = Late()
sys.argv = ["windlass", "--version"]
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_all_is_done_changes_no_exit_code(number):
    assert subprocess.run([sys.executable, "-c", LATE, str(int(number))], capture_output=True).returncode == 0


def test_work_in_time_gives_its_result_or_its_error():
    def fail(error):
        raise error

    assert in_time(lambda: 7, 60) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, 60)
    with pytest.raises(TimeoutError, match="of the work"):
        in_time(lambda: fail(TimeoutError("of the work")), 60)


def test_work_that_does_not_end_is_given_up_after_its_time_and_by_a_signal():
    ended, here = threading.Event(), threading.get_ident()
    with pytest.raises(TooLate):
        in_time(ended.wait, 0.01)
    with catch_signals() as signals, pytest.raises(KeyboardInterrupt), signals.leaving():
        in_time(lambda: (signal.pthread_kill(here, signal.SIGTERM), ended.wait()), 60)
    ended.set()
