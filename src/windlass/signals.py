"""What a signal does to a process of ours. Torch-free: it is imported before all else.

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (SLURM's warning before a time limit) and SIGHUP (a terminal that closes) ask a process to
stop. One handler for the four does one of two things:

- it *holds* a signal: notes it for `windlass.ranks.stopping.Stop`, which lets all ranks stop after the same step and save;
- it *leaves*: raises KeyboardInterrupt at once, before the first step, when there is nothing to save (`leaving`).

`__main__` installs it before it imports anything else. Until then our launcher holds signals back (`held_back`). A second Ctrl-C
leaves in either case.
"""

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, TypeVar

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
GRACE_S: Final = 5.0
"""How long the main thread may take to notice a signal before the first step, in seconds."""
AGAIN_S: Final = 0.1
"""Behind a destructor and the report of what it raised."""
_LEFT: Final = b"\0"  # no signal's number

Result = TypeVar("Result")


class _Signalled(KeyboardInterrupt):
    """No plain KeyboardInterrupt: where one passes code that a library runs from C, Python ends the process by SIGINT at its end,
    whatever exit code it was given (`_Py_UnhandledKeyboardInterrupt`)."""


class Signals:
    """The handler of SIGNALS in this process. `received`: the first signal that came, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._leaves = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        is_second = self.received is not None and number == signal.SIGINT
        if self.received is None:
            self.received = signal.Signals(number)
        if is_second or self._leaves:
            raise _Signalled

    @contextlib.contextmanager
    def leaving(self, exit_code: Callable[[], int] | None = None) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt in the main thread; one that came before does so now.

        Python runs handlers between two of its own instructions, so a main thread that waits in C (for ranks that never come)
        raises nothing. With `exit_code`, a thread ends the process with that code, GRACE_S after the signal. What a destructor
        raises Python drops: the signal comes again behind it."""
        before, self._leaves, hook = self._leaves, True, sys.unraisablehook

        def again() -> None:  # no SIGINT: that would be a second one, if the first step has begun by then
            if signals_of_process() is self:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

        def look(dropped: "sys.UnraisableHookArgs") -> None:
            if isinstance(dropped.exc_value, _Signalled):
                timer = threading.Timer(AGAIN_S, again)
                timer.daemon = True
                timer.start()
            else:
                hook(dropped)

        sys.unraisablehook = look
        try:
            if self.received is not None:
                raise _Signalled
            with _exits_after(GRACE_S, exit_code) if exit_code else contextlib.nullcontext():
                yield
        finally:
            self._leaves, sys.unraisablehook = before, hook


@contextlib.contextmanager
def _exits_after(grace_s: float, exit_code: Callable[[], int]) -> Iterator[None]:
    """Inside, a signal ends the process after `grace_s`, whatever the main thread does. Main thread only."""
    left = threading.Event()

    def end(_number: int) -> None:
        if not left.wait(grace_s):
            os._exit(exit_code())

    with _heard(end):
        try:
            yield
        finally:
            left.set()


@contextlib.contextmanager
def on_second_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Inside, a SIGINT that follows another of SIGNALS calls `act` in a thread, whoever handles signals. Main thread only."""
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard and number == signal.SIGINT:
            act()
        heard.append(number)

    with _heard(hear):
        yield


@contextlib.contextmanager
def _heard(hear: Callable[[int], None]) -> Iterator[None]:
    """Inside, a thread calls `hear` with the number of every signal that Python handles. Main thread only."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def listen() -> None:
        while (number := os.read(woken, 1)) != _LEFT:
            hear(number[0])

    thread = threading.Thread(target=listen, name="hears-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(wake, _LEFT)
        thread.join()
        os.close(woken)
        os.close(wake)


def signals_of_process() -> Signals | None:
    """The handler that `catch_signals` installed, or None where there is none."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, Signals) else None


def install_signals() -> Signals:
    """Catches SIGNALS for the rest of the process -> their handler. Main thread only.

    SIGINT and SIGHUP stay ignored where they are: nohup, and a shell's `&`, ignore them for their command. SIGTERM and SIGUSR1
    are caught even then, since a batch script ignores them only to bridge the start of Python. Signals that were held back
    until now are delivered.
    """
    found = signals_of_process()
    if found is not None:
        return found
    signals = Signals()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number not in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signals)
    _forget_in_children()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return signals


def note_signals() -> list[int]:
    """A list to which SIGNALS are added as they come, and nothing else happens: for a launcher, whose ranks decide what one
    means. Lasts until the process ends, or `catch_signals` does. Main thread only."""
    received: list[int] = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: received.append(number))
    return received


def ignore_at_end() -> None:
    """From Python's own end on, where it installs no handler, a signal changes nothing: what became of the run is written."""

    def ignore() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    # the first that is registered runs last: until then a second Ctrl-C ends what does not leave
    atexit.register(ignore)


@functools.cache
def _forget_in_children() -> None:
    """A forked child has nothing to save: signals end it, as they end any process."""

    def forget() -> None:
        for number in SIGNALS:
            if isinstance(signal.getsignal(number), Signals):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)


@contextlib.contextmanager
def catch_signals(wanted: bool = True) -> Iterator[Signals]:
    """The handler of this process, installed for the time inside where `__main__` has not. Where none is `wanted`, and off the
    main thread, where Python installs none, one that never receives anything."""
    if not wanted:
        yield Signals()
        return
    if (found := signals_of_process()) is not None:
        yield found
        return
    if threading.current_thread() is not threading.main_thread():
        print(
            "signals are not caught: train() does not run on the main thread, so nothing stops it before its last step"
        )
        yield Signals()
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield install_signals()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes started inside begin with SIGNALS blocked, until they call `install_signals` themselves. Signals to this
    process are delivered as before: a thread of their own takes them, and Python runs handlers on the main thread."""
    done = threading.Event()

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        done.wait()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    threading.Thread(target=receive, name="receives-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


class TooLate(Exception):
    """Work was still under way after its time."""


def in_time(work: Callable[[], Result], seconds: float) -> Result:
    """`work()`, which may wait in C, where no signal reaches the main thread: in a thread, which is given up after `seconds`.
    Raises TooLate, or what the work raised."""
    from concurrent.futures import Future

    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, daemon=True, name="in-time").start()
    try:
        return future.result(max(0.0, seconds))
    except TimeoutError:
        if future.done():
            raise  # the work's own
        raise TooLate from None
