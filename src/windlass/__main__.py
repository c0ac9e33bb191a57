"""The command line. It catches signals before it imports anything else, so that none ends a run that could have been saved."""

from windlass.signals import ignore_at_end, install_signals

install_signals()
ignore_at_end()

import os  # noqa: E402
import sys  # noqa: E402

from windlass.cli.main import main as command  # noqa: E402
from windlass.contract import num_ranks  # noqa: E402
from windlass.errors import exit_code_of  # noqa: E402


def main() -> None:
    """The command line as a process. A rank of several that failed ends here, at once: at Python's own end a group whose other
    ranks are gone may wait for ever for a thread of its own (gloo's `Loop::shutdown`, seen with torch 2.13)."""
    try:
        command()
    except BaseException as error:
        code = exit_code_of(error)
        if not code or num_ranks() == 1:
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
