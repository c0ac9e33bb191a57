"""Which rank a process is, by the names that its launcher exports; no torch.

torchrun gives a process its rank in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. srun and mpirun start one
process per rank too and use names of their own. `adopt` translates those, so that four processes are one world of four. Without
it each would train alone, as a world of one, and the last one would win. Names that it cannot translate are refused.
"""

import hashlib
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final, NamedTuple

from windlass.errors import EXIT_STOPPED, UserError

AGENT: Final = "WINDLASS_AGENT_PID"
"""The process id of our own launcher, in its workers."""
HOSTS: Final = "WINDLASS_RANKS_PER_HOST"
"""In the workers of our own launcher on several hosts: how many each host has."""
_ADOPTED: Final = "WINDLASS_LAUNCHER"
"""Who started this rank, once it is known."""


class Launcher(NamedTuple):
    """The names in which a launcher gives a process its rank."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_size: str
    """Ranks on this host; empty where the launcher does not say."""
    job: tuple[str, ...]
    """What all ranks of one start have in common, and no other start has; the port is made of it."""


LAUNCHERS: Final = (
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),  # a requeued job keeps its id
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    Launcher("Hydra's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),  # MPICH, Intel MPI
)
UNKNOWN: Final = ("PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK")
"""Ranks of launchers (PMIx, MVAPICH, Cray PALS, IBM JSM, Flux) whose other names are not translated."""
FIRST_PORT, NUM_PORTS = 20000, 10000
"""Ports below Linux's ephemeral ones (32768 on)."""


def adopt(environ: MutableMapping[str, str] = os.environ) -> None:
    """Puts torchrun's names into `environ` where srun or mpirun started this process as one of several, and prints on rank 0
    what was found. Does nothing where the process is alone, started by our own launcher, or adopted already.

    Raises UserError where the process is one of several that cannot be joined."""
    if _ADOPTED in environ or AGENT in environ:
        return
    if "RANK" in environ or "WORLD_SIZE" in environ:
        _check_torchrun(environ)
        by = "torchrun" if is_elastic(environ) else "a launcher that exports RANK and WORLD_SIZE"
        if environ["WORLD_SIZE"] != "1":
            _report(environ, by)
        else:
            _check_alone(environ)
        return
    known = [launcher for launcher in LAUNCHERS if launcher.rank in environ and launcher.world in environ]
    for one in known:
        if environ[one.world] != "1":
            _check_numbers(environ, one.rank, one.world, one.local_rank)
    if (launcher := _of_several(known, environ)) is not None:
        _translate(launcher, environ)
        _report(environ, f"{launcher.name} ({launcher.rank}, {launcher.world})")
        return
    # beside a step of one task that is srun's own, if it is 0; and SLURM_PROCID alone is 0 in a batch script
    is_step = [launcher.name for launcher in known] == ["srun"]
    strange = [name for name in UNKNOWN if name in environ and (not known or (is_step and environ[name] != "0"))]
    if not known and environ.get("SLURM_PROCID", "0") != "0":
        strange.append("SLURM_PROCID")
    strange += _half_named(environ)
    found = strange[0] if strange else None
    if found is not None:
        raise UserError(
            f"{found}={environ[found]}: a launcher that windlass does not know started this process as one of several",
            "processes of one run know their rank and their number; otherwise each would train a run of its own",
            "export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to each, or start with torchrun or srun "
            f"(for a single process: unset {found})",
        )


def _half_named(environ: Mapping[str, str]) -> list[str]:
    """Names of which a launcher exports more: a number of processes without a rank, a rank without their number."""
    sizes = [one.world for one in LAUNCHERS if one.rank not in environ and environ.get(one.world, "1") != "1"]
    others = {*UNKNOWN, "SLURM_PROCID"}  # which `adopt` looks at itself
    ranks = [one.rank for one in LAUNCHERS if one.rank in environ.keys() - others and one.world not in environ]
    return sizes + ranks + ["LOCAL_RANK"] * (environ.get("LOCAL_RANK", "0") not in ("0", "-1"))


def _of_several(known: Sequence[Launcher], environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that made this process one rank of several, out of those whose names are set; None: the process is alone.

    mpirun may run in a shell that srun made, which is a step of one task. And inside SLURM mpirun starts its daemons by srun, one
    per host, whose names the ranks inherit: mpirun's are the ranks' own. srun's PMI-2 exports two of Hydra's names, and not the
    third. Raises UserError where each task of srun has started an mpirun."""
    several = [launcher for launcher in known if environ[launcher.world] != "1"]
    by_mpi = [launcher for launcher in several if launcher.local_size in environ and launcher.local_rank in environ]
    outer, inner = several[:1], by_mpi[:1] or several[:1]
    if outer != inner and environ[inner[0].local_size] == environ[inner[0].world]:
        of_outer, of_inner = (f"{name}={environ[name]}" for name in (outer[0].world, inner[0].world))
        raise UserError(
            f"{of_outer}, and {of_inner}, all on this host",
            f"each task of {outer[0].name} has started {inner[0].name}, and each of these would train a run of its own",
            "start the ranks by srun alone, or by one mpirun that srun does not start",
        )
    return inner[0] if inner else None


def _check_alone(environ: Mapping[str, str]) -> None:
    """Checks a process whose WORLD_SIZE is 1. Raises UserError where another launcher started it as one of several."""
    for launcher in LAUNCHERS:
        size = environ.get(launcher.world, "1")
        if launcher.rank in environ and size != "1":
            raise UserError(
                f"WORLD_SIZE=1, and {launcher.world}={size}",
                f"{launcher.name} started this process as one of {size}, each of which would train a run of its own",
                f"for one run of {size} ranks unset RANK and WORLD_SIZE; for runs of their own unset {launcher.rank} and "
                f"{launcher.world}",
            )


def _report(environ: MutableMapping[str, str], launcher: str) -> None:
    port = environ["MASTER_PORT"]
    if not (port.isdigit() and 0 < int(port) < 1 << 16):
        raise UserError(f"MASTER_PORT={port}", "a port is a whole number from 1 to 65535", "correct MASTER_PORT")
    environ[_ADOPTED] = launcher
    if environ["RANK"] == "0":
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        print(f"{environ['WORLD_SIZE']} ranks, started by {launcher}; they meet at {where}", flush=True)
        if (warning := restart_warning(environ)) is not None:
            print(warning, flush=True)


def _check_torchrun(environ: Mapping[str, str]) -> None:
    needed: tuple[str, ...] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if environ.get("WORLD_SIZE") == "1" and "RANK" in environ and "MASTER_ADDR" not in environ:
        needed = ("RANK", "WORLD_SIZE")
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in needed if environ.get(name))
        raise UserError(
            f"{given} without {', '.join(missing)}",
            "a rank knows its number, the number of all ranks, and where they meet",
            f"export {', '.join(missing)} too, or unset {given.split('=')[0]} for a run of one process",
        )
    _check_numbers(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK")


def _check_numbers(environ: Mapping[str, str], rank: str, world: str, local_rank: str) -> None:
    """Raises UserError where one of these variables holds no whole number, or the rank is not below the number of ranks."""
    for name in (rank, world, local_rank):
        if not environ.get(name, "0").isdigit():
            raise UserError(f"{name}={environ[name]}", f"{name} is a whole number from 0", f"correct {name}")
    if int(environ[rank]) >= int(environ[world]):
        raise UserError(
            f"{rank}={environ[rank]} with {world}={environ[world]}",
            f"ranks are numbered from 0 to {world} - 1",
            "correct what the launcher exports",
        )


def _translate(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    if launcher.local_rank not in environ:
        raise UserError(
            f"{launcher.rank}={environ[launcher.rank]} without {launcher.local_rank}",
            "a rank knows its number among the ranks of its host: by it, it takes a GPU",
            "export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start with torchrun or srun",
        )
    address = environ.get("MASTER_ADDR") or _first_host(launcher, environ)
    port = environ.get("MASTER_PORT") or _port(launcher, environ)
    environ.update(
        RANK=environ[launcher.rank],
        WORLD_SIZE=environ[launcher.world],
        LOCAL_RANK=environ[launcher.local_rank],
        MASTER_ADDR=address,
        MASTER_PORT=port,
    )


def _first_host(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """Where rank 0 runs. srun lists its hosts in order; mpirun does not, but says how many ranks share this one."""
    if nodes := environ.get("SLURM_STEP_NODELIST") if launcher.name == "srun" else None:
        return first_node(nodes)
    if environ.get(launcher.local_size) == environ[launcher.world]:
        return "127.0.0.1"
    raise UserError(
        f"{launcher.name} started {environ[launcher.world]} ranks on several hosts, and MASTER_ADDR is not set",
        "all ranks meet at the host of rank 0, which this launcher does not name",
        "export MASTER_ADDR and MASTER_PORT to all ranks",
    )


def first_node(nodes: str) -> str:
    """The first host of SLURM's compressed list: `gpu[07-09,12],cpu1` -> gpu07. Several brackets are filled from the left."""
    depth, first = 0, ""
    for char in nodes:
        if char == "," and depth == 0:
            break
        depth += (char == "[") - (char == "]")
        first += char
    return re.sub(r"\[([^\]]*)\]", lambda found: re.split("[-,]", found[1])[0], first)


def _port(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """A port that is equal on every rank of one start, and most likely another for any other start on the same host."""
    job = [environ[name] for name in launcher.job if name in environ]
    if not job:
        raise UserError(
            f"{launcher.name} started {environ[launcher.world]} ranks, and MASTER_PORT is not set",
            "all ranks meet at one port, which no other run on that host uses; this launcher names nothing to derive one from",
            "export MASTER_ADDR and MASTER_PORT to all ranks, for example MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 on one host",
        )
    digest = hashlib.sha256(f"{launcher.name}/{'/'.join(job)}".encode()).digest()
    return str(FIRST_PORT + int.from_bytes(digest[:4]) % NUM_PORTS)


def shares_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent keeps one store over all restarts (seen with torch 2.13). A rank that finds there the addresses
    of the ranks before it fails to connect."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt(environ: Mapping[str, str] = os.environ) -> str:
    """A prefix for the keys of this start's ranks in a store that outlives them; empty where the store is new, or where no name
    distinguishes the starts: the agents of several hosts count their restarts differently."""
    is_one_host = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"attempt-{environ['TORCHELASTIC_RESTART_COUNT']}" if shares_store(environ) and is_one_host else ""


def restart_warning(environ: Mapping[str, str] = os.environ) -> str | None:
    """A torchrun over several hosts whose restarts cannot work, or None."""
    restarts, hosts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), environ.get("GROUP_WORLD_SIZE", "1")
    if not shares_store(environ) or restarts == "0" or hosts == "1":
        return None
    return (
        f"warning: the {restarts} restarts of this torchrun over {hosts} hosts will fail (connectFullMesh): it keeps the "
        "addresses of the ranks before a restart; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on every host"
    )


def environment_of_child(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that a rank starts and that is none: without the names that would make it one."""
    launchers = {name for one in LAUNCHERS for name in (one.rank, one.world, one.local_rank)}
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", AGENT, HOSTS, _ADOPTED, *launchers, *UNKNOWN}
    return {
        name: value for name, value in environ.items() if name not in names and not name.startswith("TORCHELASTIC_")
    }


def num_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes train together, as far as the environment says; after `adopt`."""
    return int(environ.get("WORLD_SIZE", "1"))


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number among them; after `adopt`."""
    return int(environ.get("RANK", "0"))


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number among those of its host; after `adopt`."""
    return int(environ.get("LOCAL_RANK", "0"))


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an agent of torchelastic started this rank: torchrun, Flyte, or our own of several hosts."""
    return "TORCHELASTIC_RUN_ID" in environ


def has_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether our own launcher started this rank: it shows what a failing rank wrote."""
    return AGENT in environ


def exit_code_of_stop(is_signalled: bool, environ: Mapping[str, str] = os.environ) -> int:
    """The exit code of a rank whose run was stopped and saved. `is_signalled`: whether this very rank received the signal.

    torchelastic takes 0 for the end of the run and any other code for a failure, after which it starts the ranks that are left.
    So a rank that was signalled itself, whose agent is leaving, exits with 0, and one that stopped for the sake of another with
    75. Our own agents of several hosts start again after 75 alone: 0 is the end."""
    return 0 if is_elastic(environ) and is_signalled and HOSTS not in environ else EXIT_STOPPED
