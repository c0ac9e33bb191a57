"""Where the ranks of a run say what they do, and the process that looks after them where no launcher of ours does."""

import contextlib
import secrets
import sys
from pathlib import Path

from windlass.config import RunConfig
from windlass.contract import has_agent, rank
from windlass.flight_recorder import last_collectives
from windlass.runtime import Runtime, is_restarted
from windlass.supervise.beside import Hosts, Watch, watched_beside
from windlass.supervise.heartbeat import Heartbeat, folder_of, read_beats


def open_heartbeat(run_directory: Path, is_seen: bool) -> Heartbeat:
    """Where this rank says what it does, for `windlass stacks`. Unless `is_seen`, to nobody: where signals are not ours to catch,
    as in a process group of the caller's, since a stack is asked for by a signal."""
    return Heartbeat(folder_of(run_directory), rank(), last_collectives, has_agent()) if is_seen else Heartbeat()


def watched(config: RunConfig, runtime: Runtime, is_seen: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, a process looks after this host's ranks, where no launcher of ours does; the first of them starts it. There is none
    for a single process that nothing would start again, or that runs on a terminal, with a debugger maybe. Collective."""
    is_alone = runtime.world == 1 and (not is_restarted() or (sys.stdin is not None and sys.stdin.isatty()))
    if has_agent() or not is_seen or runtime.store is None or not config.launch.stall_s or is_alone:
        return contextlib.nullcontext()
    # ranks of one host are those that see each other's pages: containers may share its name, or not its memory
    seen = [beat.rank for beat in read_beats(config.run.directory) if beat.is_alive]
    firsts, name = runtime.gathered(min(seen, default=runtime.rank)), runtime.shared(secrets.token_hex(8))
    if firsts[runtime.rank] != runtime.rank:
        return contextlib.nullcontext()
    hosts = sorted(set(firsts))
    meet = None if len(hosts) == 1 else (*runtime.address, name, len(hosts), hosts.index(runtime.rank))
    directory, stall_s = str(config.run.directory.resolve()), config.launch.stall_s
    return watched_beside(Watch(directory, stall_s, config.data.batch_timeout_s + stall_s, meet and Hosts(*meet)))
