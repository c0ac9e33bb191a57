"""How many files, sockets among them, a process may have open. The rank that serves the store has a socket per rank."""

import resource
from typing import Final

MOST_FILES: Final = 1 << 16
"""How many open files a process of ours asks for, where the system lets it: a store for 16,384 ranks, and its own."""


def allow_many_files() -> None:
    """Raises the limit of this process as far as the system lets it: a shell's 1,024 files end at some 1,000 ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
