"""The process a rank runs in: its world, and what ranks do once for all."""

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute

from tests.parallel.tiny import MODEL, batch, make_program
from windlass import runtime as page
from windlass.errors import Unavailable, UserError, WindlassError, exit_code_of
from windlass.optim.clip import gradient_norm
from windlass.proof.pool import RankFailed
from windlass.ranks.awaited_work import FailedElsewhere
from windlass.runtime import Runtime, recorded, start_runtime

CPU = torch.device("cpu")


def runtime_over(path):
    """This rank of the pool's world, with a store of its own, as start_runtime makes it under a launcher; without one where
    `path` is None, as in a process group of the caller's."""
    world = dist.get_world_size()
    store = None if path is None else dist.PrefixStore("windlass", dist.FileStore(path, world))
    return Runtime(dist.get_rank(), world, CPU, store, dist.group.WORLD, dist.group.WORLD)


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_an_empty_environment_is_a_world_of_one_and_a_rank_alone_needs_no_address(monkeypatch, given):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    runtime = start_runtime()
    try:
        assert (runtime.rank, runtime.world, dist.get_world_size()) == (0, 1, 1)
        assert runtime.store is not None and runtime.control.size() == runtime.saving.size() == 1
        assert runtime.control is not runtime.saving
        assert runtime.first(lambda: 7) == 7 and runtime.max_over_ranks(3.5) == 3.5 and runtime.shared(True) is True
        assert runtime.hosts() == [socket.gethostname()]
    finally:
        runtime.close()
    assert not dist.is_initialized()


def test_a_store_that_outlives_its_ranks_holds_nothing_of_the_ranks_before(monkeypatch):
    """The agent of a user's torchrun may keep one store over all restarts."""
    kept = dist.HashStore()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "HashStore", lambda: kept)
    monkeypatch.setattr(page, "adopt", lambda: None)
    for _ in range(2):
        with start_runtime() as runtime:
            assert runtime.store is not None and not runtime.store.check(["stop"])
            runtime.store.set("stop", "7")


def test_each_run_of_a_process_meets_with_keys_of_its_own(monkeypatch):
    prefixes = []

    def meet(*where):
        prefixes.append(where[-1])
        raise Unavailable("given", "rule", "change")

    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(page, "adopt", lambda: None)
    monkeypatch.setattr(page, "meet", meet)
    for _ in range(3):
        with pytest.raises(Unavailable):
            start_runtime()
    assert len(set(prefixes)) == 3 and all(one.startswith("attempt-3/run-") for one in prefixes)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_run_whose_group_was_left_no_other_begins(monkeypatch, error):
    monkeypatch.setattr(page, "_LEFT", [])
    runtime = page.Runtime(1, 2, torch.device("cpu"), dist.HashStore(), None, None)
    with pytest.raises(UserError), runtime:
        raise UserError("given", "rule", "change")
    assert page._LEFT == []
    with pytest.raises(error), runtime:
        raise error
    with pytest.raises(UserError) as caught:
        start_runtime()
    assert caught.value.given == f"train() is called after a run of these ranks has failed with {error.__name__}"


def warnings_of_a_clip():
    """What torch says of a norm that is summed over two axes."""
    start_runtime().close()
    logger, heard = logging.getLogger("torch.distributed.tensor._redistribute"), logging.Handler()
    records = []
    heard.emit = records.append
    logger.addHandler(heard)
    getattr(_redistribute, "_warned_flatten_issues", set()).clear()  # it says each thing once
    program = make_program(4, shard=2, tp=2, model={**MODEL, "num_attention_heads": 4, "num_key_value_heads": 2})
    program.run([batch()], torch.tensor(8.0))
    gradient_norm(program.records(), program.mesh.pp_group)
    logger.removeHandler(heard)
    return [record.getMessage() for record in records]


def test_a_sum_over_two_axes_is_no_warning_to_the_user(ranks):
    assert ranks.run(4, warnings_of_a_clip) == [[]] * 4


def asked_of_all(path):
    """What the ranks agree on, with a store and inside a foreign group."""
    rank = dist.get_rank()
    own, foreign = runtime_over(path), start_runtime()
    answers = []
    for runtime in (own, foreign):
        answers.append(runtime.max_over_ranks([1.5, 2.5][rank]))
        answers += [runtime.shared(rank == 0), runtime.shared(rank == 1), runtime.hosts()]
        answers.append(runtime.first(lambda: rank))
    foreign.close()
    return answers, dist.is_initialized(), foreign.memory_bytes() > 1e6


def test_ranks_agree_with_or_without_a_store(ranks, tmp_path):
    host = socket.gethostname()
    for rank, (answers, is_open, has_memory) in enumerate(ranks.run(2, asked_of_all, str(tmp_path / "store"))):
        assert answers == [2.5, True, False, [host, host], 0 if rank == 0 else None] * 2
        assert is_open, "a group that was there before is left open"
        assert has_memory


def first_waits(path):
    runtime = runtime_over(path)
    seen = []
    for turn in "ab":
        done = Path(f"{path}.done-{turn}")

        def work(done=done):
            time.sleep(0.3)
            done.touch()

        runtime.first(work)
        seen.append(done.exists())
    return seen


def test_the_others_wait_for_what_the_first_does_each_time(ranks, tmp_path):
    assert ranks.run(2, first_waits, str(tmp_path / "store")) == [[True, True]] * 2


class OfAScript(UserError):
    """A script's own data source may raise such a one."""

    def __init__(self, row):
        super().__init__(f"row {row}", "a rule", "a change")
        self.row = row


def first_fails(path, error):
    """The second thing that rank 0 does for all fails. -> how each rank leaves, and whether the ranks still hear each other."""

    def work():
        raise error

    runtime = runtime_over(path)
    runtime.first(lambda: None)
    try:
        runtime.first(work)
    except (WindlassError, ValueError, SystemExit) as left:
        return type(left), exit_code_of(left), str(left), getattr(left, "elsewhere", None), runtime.shared("together")
    return "went on"


has_store = pytest.mark.parametrize("has_store", [True, False], ids=["store", "group-of-the-caller"])


@has_store
@pytest.mark.parametrize("error", [Unavailable("a", "b", "c"), OfAScript(7)])
def test_a_mistake_that_the_first_finds_is_the_same_on_all_and_known_to_be_of_another(
    ranks, tmp_path, error, has_store
):
    found = ranks.run(3, first_fails, str(tmp_path / "store") if has_store else None, error)
    kind = (type(error), error.code, str(error))
    assert found == [(*kind, elsewhere, "together") for elsewhere in (False, True, True)]


def fails_by_what_cannot_travel(path):
    class Local(UserError):
        """No other process finds its class."""

    try:
        runtime_over(path).first(lambda: (_ for _ in ()).throw(Local("a", "b", "c")))
    except (UserError, SystemExit) as left:
        return type(left).__name__, exit_code_of(left), str(left)
    return "went on"


def test_a_mistake_that_cannot_travel_ends_the_others_with_its_code(ranks, tmp_path):
    said = str(UserError("a", "b", "c"))
    assert ranks.run(2, fails_by_what_cannot_travel, str(tmp_path / "store")) == [
        ("Local", 2, said),
        ("FailedElsewhere", 2, said),
    ]


@has_store
def test_where_the_first_fails_by_a_bug_the_others_leave_silently_with_its_code(ranks, tmp_path, has_store):
    path = str(tmp_path / "store") if has_store else None
    assert ranks.run(2, first_fails, path, ValueError("a bug")) == [
        (ValueError, 1, "a bug", None, "together"),
        (FailedElsewhere, 1, "a bug", None, "together"),
    ]


def test_an_agent_reads_why_from_whichever_rank_it_sees_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def work():
        raise FailedElsewhere(2, "what was given\n  change: this")

    with pytest.raises(SystemExit):
        recorded(work)()
    assert "change: this" in (tmp_path / "error.json").read_text()


def ends_by(path, errors):
    """-> the exit code that each rank takes its own error for, rank 1 first."""
    runtime, error = runtime_over(path), errors[dist.get_rank()]
    if runtime.rank == 0:
        runtime.tree.barrier()
    code = runtime.exit_code(error)
    if runtime.rank == 1:
        runtime.tree.barrier()
    return code


@pytest.mark.parametrize(
    ("errors", "codes"),
    [
        ((RuntimeError("connection closed"), UserError("a", "b", "c")), [2, 2]),
        ((RuntimeError("connection closed"), ValueError()), [1, 1]),
        ((Unavailable("a", "b", "c"), UserError("a", "b", "c")), [74, 2]),
        ((KeyboardInterrupt(), UserError("a", "b", "c")), [130, 2]),
    ],
)
def test_what_fails_for_the_sake_of_another_ranks_mistake_ends_with_its_code(ranks, tmp_path, errors, codes):
    assert ranks.run(2, ends_by, str(tmp_path / "store"), errors) == codes


class TwoHosts(Runtime):
    def hosts(self):
        return ["a", "b", "a", "b"][: self.world]


def once_per_host(path, failing):
    """-> what this rank did and how it left: `failing` is the rank whose work cannot be done."""
    runtime = TwoHosts(**vars(runtime_over(path)))
    did = []

    def work():
        did.append(runtime.rank)
        if runtime.rank == failing:
            raise UserError("no", "room", "left")
        time.sleep(0.2)
        Path(f"{path}.done-{runtime.rank}").touch()

    try:
        runtime.first_on_host(work)
    except UserError as left:
        return did, left.given, left.elsewhere
    finished = sorted(file.suffix for file in Path(path).parent.glob("*.done-*"))
    return did, runtime.shared(f"of rank {runtime.rank}"), finished


def test_one_rank_per_host_works_while_all_wait(ranks, tmp_path):
    found = ranks.run(4, once_per_host, str(tmp_path / "store"), None)
    both = [".done-0", ".done-1"]
    assert found == [
        ([0], "of rank 0", both),
        ([1], "of rank 0", both),
        ([], "of rank 0", both),
        ([], "of rank 0", both),
    ]


def test_where_one_host_fails_all_leave_and_one_says_why(ranks, tmp_path):
    found = ranks.run(4, once_per_host, str(tmp_path / "store"), 1)
    assert found == [([0], "no", True), ([1], "no", False), ([], "no", True), ([], "no", True)]


# ---- devices


@pytest.mark.parametrize(("count", "word"), [(2, "2 GPUs"), (1, "1 GPU")])
def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch, count, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(UserError) as caught:
        page._device(count)
    assert f"local rank {count} on {socket.gethostname()}, which has {word}" == caught.value.given
    assert f"--nproc {count})" in caught.value.change
    assert page._device(count - 1) == torch.device("cuda", count - 1)


def die(path):
    raise RuntimeError("planted")


def test_the_pool_is_whole_after_these(ranks):
    with pytest.raises(RankFailed, match="planted"):
        ranks.run(2, die, "")


@pytest.mark.parametrize(
    "given", [{}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}]
)
def test_the_allocator_grows_its_segments_unless_the_user_says_otherwise(given):
    """Read back from torch, in a process whose allocator nobody has used."""
    program = (
        "import os, torch; from dataclasses import replace; from windlass.runtime import start_runtime\n"
        "with start_runtime() as runtime:\n"
        "    gpu = replace(runtime, device=torch.device('cuda'))\n"
        "    print(torch._C._accelerator_getAllocatorSettings(), runtime.allocator(), gpu.allocator())"
    )
    others = {name: value for name, value in os.environ.items() if name not in page.ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", program], env=others | given, capture_output=True, text=True, check=True
    )
    settings = next(iter(given.values()), "expandable_segments:True")
    assert done.stdout.split() == [settings, "None", settings]
