"""A page of memory that the ranks of one host share: after each step one of them asks the store, the others read what it heard.

Without it every rank asks the store's one server in every step: 16,384 requests that arrive together, and each rank waits for
its answer. So the server hears from each host once. The first rank of the host looks for its answer after step s, and writes
it with s; the others wait until the page says s. All of them have left the same collective, so that is a short wait, and what
the first rank heard after step s is what each of them would have heard then or later.

Which ranks share memory is tried with a file, and not derived from names: ranks in containers may have one host's name and
memory of their own. The file has no name any more once all have opened it, so nothing stays behind however a rank ends.

    messages   two gathers and two broadcasts along the tree at the start; none later
    requests   one per host and step (one per rank, where ranks share no memory)
"""

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from windlass.ranks.tree import Tree

NEVER: Final = (1 << 32) - 1
"""The answer of a store that has none yet; no step is as large."""
_WORD: Final = struct.Struct("Q")
"""The step after which the answer was heard, plus one, above 32 bits of the answer. One word, so that no processor shows the
step before its answer."""
SPINS: Final = 200  # looks before the first pause; chosen
PAUSE_S: Final = 2e-4  # chosen: what a step may be late
LOOKS: Final = 256
"""How many looks apart it is asked whether the first rank is there: some 50 ms."""
WAIT_S: Final = 600.0
"""How long a rank waits for the page: as long as for a collective, so that a first rank that is gone ends the others too."""
FOLDERS: Final = (Path("/dev/shm"), Path(tempfile.gettempdir()))


class HostPage:
    """Collective: every rank of the tree makes one. It is let go of with the process, or by the last reference to it."""

    def __init__(self, tree: Tree, folders: tuple[Path, ...] = FOLDERS):
        folder = next(folder for folder in folders if os.access(folder, os.W_OK))
        token = tree.broadcast(secrets.token_hex(8))
        own = folder / f"windlass-{token}-{tree.rank}"
        own.write_bytes(_WORD.pack(NEVER))
        tree.barrier()
        seen = {int(file.name.rpartition("-")[2]): file for file in folder.glob(f"windlass-{token}-*")}
        first = min(seen)
        self.is_first = first == tree.rank
        self._file = os.open(seen[first], os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        if self.is_first:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel lets go of it however this process ends
        self._memory = mmap.mmap(self._file, _WORD.size)
        tree.barrier()
        own.unlink()

    def after(self, step: int, ask: Callable[[], int]) -> int:
        """What `ask` returned on this host's first rank after step `step`, or later. Raises ConnectionError where that rank has
        ended, as its peers in a collective do, and TimeoutError."""
        if self.is_first:
            answer = ask()
            _WORD.pack_into(self._memory, 0, step + 1 << 32 | answer)
            return answer
        end_s, looks = time.monotonic() + WAIT_S, 0
        while (word := self._word()) >> 32 <= step:
            looks += 1
            if looks > SPINS:
                time.sleep(PAUSE_S)
            # looked at once more: it may have answered since, and then ended in good order
            if looks % LOOKS == 0 and self._is_abandoned() and self._word() >> 32 <= step:
                raise ConnectionResetError(f"the first rank of this host has ended before the end of step {step}")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the first rank of this host has not come to the end of step {step}")
        return word & NEVER

    def _word(self) -> int:
        return int(_WORD.unpack_from(self._memory)[0])

    def _is_abandoned(self) -> bool:
        """Whether nobody holds the first rank's lock any more."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
