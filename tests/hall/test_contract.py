"""Which rank the names of a launcher make a process."""

import pytest

from windlass.contract import adopt, attempt, exit_code_of_stop, first_node, restart_warning
from windlass.errors import UserError

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1221853185",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
FIRST = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@pytest.mark.parametrize(
    ("given", "names", "by"),
    [
        (SRUN, ("3", "4", "1", "gpu07"), "4 ranks, started by srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"),
        (OPEN_MPI, ("1", "2", "1", "127.0.0.1"), "2 ranks, started by Open MPI's mpirun (OMPI_COMM_WORLD_RANK, "),
        (HYDRA | {"MASTER_PORT": "29500"}, ("1", "2", "1", "127.0.0.1"), "2 ranks, started by Hydra's mpirun"),
        # mpirun over the hosts of a job, whose daemons are tasks of srun
        (
            SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"},
            ("1", "8", "1", "gpu07"),
            "8 ranks, started by Open",
        ),
        (
            SRUN | HYDRA | {"PMI_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"},
            ("1", "8", "1", "gpu07"),
            "8 ranks, started by Hydra",
        ),
        # srun's PMI-2
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("3", "4", "1", "gpu07"), "4 ranks, started by srun"),
        (SRUN | {"MASTER_ADDR": "10.0.0.1"}, ("3", "4", "1", "10.0.0.1"), "4 ranks, started by srun"),
        (TORCHRUN, ("1", "2", "1", "n0"), "2 ranks, started by a launcher that exports RANK and WORLD_SIZE; "),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, ("1", "2", "1", "n0"), "2 ranks, started by torchrun; "),
        (TORCHRUN | SRUN, ("1", "2", "1", "n0"), "2 ranks, started by a launcher that exports RANK"),
        # mpirun in the shell of salloc, which is a step of one task
        (
            SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI,
            ("1", "2", "1", "127.0.0.1"),
            "2 ranks, started by Open",
        ),
    ],
)
def test_a_rank_knows_itself_by_any_launchers_names(given, names, by, capsys):
    environ = dict(given)
    adopt(environ)
    assert tuple(environ[name] for name in NAMES) == names
    assert capsys.readouterr().out == "", "rank 0 says it"
    first = {name: "0" if name in FIRST else value for name, value in given.items()}
    adopt(first)
    adopt(first)  # once
    found = capsys.readouterr().out
    assert found.startswith(by) and found.endswith(f"; they meet at {names[-1]}:{environ['MASTER_PORT']}\n")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "12"},  # the batch script itself, outside srun
        {"RANK": "0", "WORLD_SIZE": "1"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        TORCHRUN | {"WINDLASS_AGENT_PID": "7"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0", "PMI_RANK": "0"},
    ],
)
def test_a_process_alone_or_of_our_own_launcher_is_left_as_it_is(environ, capsys):
    before = dict(environ)
    adopt(environ)
    assert environ == before and capsys.readouterr().out == ""


def test_the_port_is_that_of_the_start():
    def port(given):
        environ = dict(given)
        adopt(environ)
        return int(environ["MASTER_PORT"])

    ranks = {port(SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}) for rank in range(4)}
    others = {port(SRUN | {"SLURM_STEP_ID": str(step)}) for step in range(1, 9)} - ranks
    assert len(ranks) == 1 and len(others) == 8 and all(20000 <= one < 30000 for one in ranks | others)
    assert port(SRUN | {"SLURM_RESTART_COUNT": "1"}) not in ranks  # a requeued job keeps its id
    assert port(OPEN_MPI) != port(OPEN_MPI | {"PMIX_NAMESPACE": "1221853186"})


@pytest.mark.parametrize(
    ("environ", "given", "change"),
    [
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0: a launcher that windlass does not know", "unset PMIX_RANK"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID=1: a launcher", "unset SLURM_PROCID"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "1"}, "PMIX_RANK=1: a launcher", "unset PMIX_RANK"),
        *(
            ({name: value}, f"{name}={value}: a launcher", f"unset {name}")  # half of what a launcher exports
            for name, value in (
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("PMI_SIZE", "2"),
                ("LOCAL_RANK", "1"),
            )
        ),
        (SRUN | {"SLURM_PROCID": "zero"}, "SLURM_PROCID=zero", "correct SLURM_PROCID"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS=two", "correct SLURM_STEP_NUM_TASKS"),
        (SRUN | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID=-1", "correct SLURM_LOCALID"),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"},
            "PMI_RANK=5 with PMI_SIZE=2",
            "correct what the launcher exports",
        ),
        (
            TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"} | OPEN_MPI,
            "WORLD_SIZE=1, and OMPI_COMM_WORLD_SIZE=2",
            "for one run of 2 ranks unset RANK and WORLD_SIZE; for runs of their own unset OMPI_COMM_WORLD_RANK and",
        ),
        ({"PALS_RANKID": "1"}, "PALS_RANKID=1: a launcher that windlass does not know", "export RANK, WORLD_SIZE"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1: a launcher", "start with torchrun or srun"),
        ({"MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_RANK=1: a launcher", "start with torchrun or srun"),
        (HYDRA, "Hydra's mpirun started 2 ranks, and MASTER_PORT is not set", "export MASTER_ADDR and MASTER_PORT"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "Open MPI's mpirun started 2 ranks on several hosts, and MASTER_ADDR is not set",
            "export MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_PROCID=1 without SLURM_LOCALID",
            "export RANK, WORLD_SIZE, LOCAL_RANK",
        ),
        ({"RANK": "1"}, "RANK=1 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "export WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 without RANK, MASTER_ADDR, MASTER_PORT", "or unset WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT", "or unset RANK"),
        (SRUN | OPEN_MPI, "SLURM_STEP_NUM_TASKS=4, and OMPI_COMM_WORLD_SIZE=2, all on this host", "by srun alone"),
        (TORCHRUN | {"RANK": "2"}, "RANK=2 with WORLD_SIZE=2", "correct what the launcher exports"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two", "correct WORLD_SIZE"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999", "correct MASTER_PORT"),
        (SRUN | {"MASTER_PORT": "29500/tcp"}, "MASTER_PORT=29500/tcp", "correct MASTER_PORT"),
    ],
)
def test_several_processes_that_cannot_be_joined_are_refused(environ, given, change):
    with pytest.raises(UserError) as caught:
        adopt(dict(environ))
    assert caught.value.given.startswith(given) and change in caught.value.change


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("r[2,4]n[010-012]", "r2n010"),
        ("a-b[3]", "a-b3"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_node(nodes) == first


SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}


def test_a_store_that_outlives_the_ranks_is_prefixed_on_one_host_and_warned_of_on_several(capsys):
    assert attempt({}) == "" and restart_warning({}) is None
    one_host, two_hosts = SHARED | {"GROUP_WORLD_SIZE": "1"}, SHARED | {"GROUP_WORLD_SIZE": "2"}
    assert attempt(one_host) == "attempt-2" and restart_warning(one_host) is None
    assert attempt(two_hosts) == "", "their agents count restarts differently"
    assert "3 restarts" in restart_warning(two_hosts) and "2 hosts" in restart_warning(two_hosts)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in restart_warning(two_hosts)
    assert restart_warning(two_hosts | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    adopt(TORCHRUN | two_hosts | {"RANK": "0"})
    assert capsys.readouterr().out.endswith(f"\n{restart_warning(two_hosts)}\n")
    fixed = two_hosts | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert attempt(fixed) == "" and restart_warning(fixed) is None


def test_a_stopped_rank_leaves_with_0_only_where_its_own_elastic_agent_is_leaving():
    elastic = {"TORCHELASTIC_RUN_ID": "x"}
    assert [exit_code_of_stop(signalled, environ) for environ in (elastic, {}) for signalled in (True, False)] == [
        0, 75, 75, 75,
    ]  # fmt: skip
