"""Where ranks meet, and the words where they cannot. Clocks are the test's: no rank waits for ten minutes here."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
import yaml

from tests import tiny
from tests.ports import silent_port
from windlass.errors import EXIT_UNAVAILABLE, Unavailable, UserError
from windlass.ranks import meeting
from windlass.ranks.meeting import LINGER_S, WAIT_S, meet

HOST = socket.gethostname()


class Clock:
    """Its time is what was slept; `naps` are the times slept."""

    def __init__(self):
        self.naps = []

    def __call__(self):
        return sum(self.naps)

    def sleep(self, seconds):
        self.naps.append(seconds)


def forever():
    """A clock that does not move, for ranks that wait for another thread."""
    return {"clock": lambda: 0.0, "sleep": lambda seconds: time.sleep(0.001)}


@pytest.fixture
def store(monkeypatch):
    """One that no port is needed for, whoever opens it."""
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "_serve", lambda port: store)
    monkeypatch.setattr(meeting, "_reach", lambda *_: store)
    return store


def meet_all(calls):
    """Calls each in a thread of its own -> what each returned or raised."""
    found = [None] * len(calls)

    def run(at, call):
        try:
            found[at] = call()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at, call)) for at, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("prefix", ["", "attempt-1"])
def test_ranks_that_all_come_have_one_store(prefix, capfd):
    port = free_port()
    stores = meet_all([lambda rank=rank: meet(rank, 3, "localhost", port, False, prefix) for rank in range(3)])
    stores[2].set("a", "b")
    assert [store.get("a") for store in stores] == [b"b"] * 3
    assert {store.timeout.total_seconds() for store in stores} == {WAIT_S}
    assert capfd.readouterr().err == ""


def test_the_next_run_of_the_same_ranks_meets_at_the_same_port_and_finds_nothing_of_the_first():
    port = free_port()
    for run in range(3):
        prefix = f"run-{run}"
        calls = [lambda rank=rank, prefix=prefix: meet(rank, 2, "localhost", port, False, prefix) for rank in range(2)]
        stores = meet_all(calls)
        assert not any(store.check(["of a run"]) for store in stores)
        stores[run % 2].set("of a run", str(run))
        assert [store.get("of a run") for store in stores] == [str(run).encode()] * 2
        del stores  # rank 0 is through; others may still read, or come to the next run first
        socket.create_connection(("127.0.0.1", port)).close()


def test_ranks_that_do_not_come_are_named_to_all_that_did_within_bounded_time(store):
    clock = Clock()
    other = threading.Thread(target=lambda: said.extend(meet_all([lambda: meet(2, 5, "a", 7, False, **forever())])))
    said = []
    other.start()
    while not store.check(["meeting/came/2"]):
        time.sleep(0.001)
    with pytest.raises(Unavailable) as caught:
        meet(0, 5, "a", 7, False, clock=clock, sleep=clock.sleep)
    other.join()
    assert caught.value.given == (f"ranks 1, 3-4 of 5 did not come to a:7 within 600 s; there are ranks 0, 2 on {HOST}")
    assert "`windlass doctor --endpoint a:7`" in caught.value.change
    assert (caught.value.code, caught.value.retry) == (74, True)
    assert str(said[0]) == str(caught.value), "one text: a launcher prints it once"
    assert WAIT_S < clock() <= WAIT_S + 2 + LINGER_S and clock.naps[-1] == LINGER_S, "the others still read it"
    assert clock.naps[0] == 0.02 and max(clock.naps[:-1]) == 2.0 and len(clock.naps) < 400


def test_many_hosts_are_not_all_listed(store):
    for rank in range(1, 40):
        store.set(f"meeting/came/{rank}", json.dumps([f"host-{rank // 4}", 1, ""]))
    clock = Clock()
    with pytest.raises(Unavailable) as caught:
        meet(0, 48, "a", 7, False, clock=clock, sleep=clock.sleep)
    assert caught.value.given.startswith("ranks 40-47 of 48 did not come to a:7 within 600 s; there are rank 0 on ")
    assert caught.value.given.endswith("ranks 24-27 on host-6, and those of 3 more hosts")


def test_where_an_agent_serves_the_store_any_rank_knows_who_is_missing_and_old_keys_are_written_over(store):
    store.set("meeting/came/1", json.dumps(["old", 1, ""]))
    store.set("meeting/world", "9")
    clock = Clock()
    with pytest.raises(Unavailable) as caught:
        meet(1, 2, "a", 7, True, clock=clock, sleep=clock.sleep)
    assert caught.value.given == f"rank 0 of 2 did not come to a:7 within 600 s; there are rank 1 on {HOST}"
    assert clock() <= WAIT_S + LINGER_S + 2


def test_two_processes_with_one_number_and_two_sizes_of_the_world_are_refused_at_once(store):
    clock = Clock()
    meet_all([lambda: meet(1, 2, "a", 7, False, **forever()), lambda: meet(0, 2, "a", 7, False, **forever())])
    with pytest.raises(UserError) as twice:
        meet(1, 2, "a", 7, False, clock=clock, sleep=clock.sleep)
    assert twice.value.given == f"two processes are rank 1: {os.getpid()} on {HOST}, and {os.getpid()} on {HOST}"
    with pytest.raises(UserError) as other:
        meet(2, 3, "a", 7, False, clock=clock, sleep=clock.sleep)
    assert other.value.given == (f"rank 2 on {HOST} has WORLD_SIZE=3, another one of its ranks has WORLD_SIZE=2")
    assert (twice.value.code, other.value.code, clock.naps) == (2, 2, [])


def refused(host, port):
    """What rank 3 says that cannot reach the store, after how long by its clock."""
    clock = Clock()
    with pytest.raises(Unavailable) as caught:
        meet(3, 4, host, port, False, clock=clock, sleep=clock.sleep)
    assert WAIT_S < clock() <= WAIT_S + 2
    assert caught.value.given.startswith(f"rank 3 on {HOST}: ") and caught.value.given.endswith(", tried for 600 s")
    assert "MASTER_ADDR is its host's address" in caught.value.change
    return caught.value.given.removeprefix(f"rank 3 on {HOST}: ").removesuffix(", tried for 600 s")


def test_a_name_that_does_not_resolve(monkeypatch, capfd):
    def fails(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", fails)
    assert refused("no-such-host", 7) == "the name no-such-host does not resolve (Name or service not known)"
    assert capfd.readouterr().err == ""


def test_an_address_where_nobody_listens_and_one_that_does_not_answer(monkeypatch, capfd):
    port = free_port()
    assert refused("127.0.0.1", port) == f"nobody answers at 127.0.0.1:{port} (Connection refused)"

    def waits(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", waits)
    assert refused("10.9.9.9", 7) == "nobody answers at 10.9.9.9:7 (timed out)"
    assert capfd.readouterr().err == ""


def test_a_connection_to_itself_is_none(monkeypatch):
    """A client that asks again and again for a port where nobody listens may be given that very port for its own end."""
    port = free_port()

    def meets_itself(_place, _timeout):
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
        found.connect(("127.0.0.1", port))
        return found

    monkeypatch.setattr(socket, "create_connection", meets_itself)
    assert refused("127.0.0.1", port) == f"nobody answers at 127.0.0.1:{port} (Connection refused)"
    monkeypatch.undo()
    assert meeting._serve(port) is not None, "rank 0 has the port at once"


def test_a_port_that_another_process_has(monkeypatch, capfd):
    """Its rank 0 cannot serve there, and the others do not take it for a store."""
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    monkeypatch.setattr(meeting, "WAIT_S", 1.0)
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=answer, args=[server], daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(Unavailable) as caught:
            meet(0, 2, "127.0.0.1", port, False)
        assert caught.value.given == f"rank 0 cannot serve port {port} of {HOST}: address already in use"
        assert f"`ss -ltnp sport = :{port}`" in caught.value.change and "another MASTER_PORT" in caught.value.change
        clock = Clock()
        with pytest.raises(
            Unavailable, match=f": what answers at 127.0.0.1:{port} is no store of ranks, tried for 1 s"
        ):
            meet(1, 2, "127.0.0.1", port, False, clock=clock, sleep=clock.sleep)
    assert capfd.readouterr().err == "", "no frames of C++"


def test_a_program_that_listens_and_says_nothing(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_S", 0.1)
    monkeypatch.setattr(meeting, "LOOK_S", 0.2)
    monkeypatch.setattr(meeting, "WAIT_S", 1.0)
    clock = Clock()
    port = silent_port()
    with pytest.raises(Unavailable, match=f": what listens at 127.0.0.1:{port} answers nothing, tried for 1 s"):
        meet(1, 2, "127.0.0.1", port, False, clock=clock, sleep=clock.sleep)


def answer(server):
    """Like a web server that is asked something else."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(64)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_store_that_ends_with_rank_0(capfd):
    port = free_port()
    server = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        server.clear()

    with pytest.raises(Unavailable) as caught:
        meet(1, 2, "127.0.0.1", port, False, clock=lambda: 0.0, sleep=sleep)
    assert caught.value.given == (
        f"rank 1 on {HOST}: the store at 127.0.0.1:{port} is gone before all 2 ranks have come"
    )
    assert "frame #" not in capfd.readouterr().err


TRAIN = """
import sys
from windlass.ranks import meeting
meeting.WAIT_S, meeting.LINGER_S = 1.0, 0.0
from windlass.cli.main import main
sys.argv = ["windlass", "train", "recipe.yaml"]
main()
"""


@pytest.mark.parametrize(("rank", "given"), [(0, "rank 1 of 2 did not come to "), (1, "nobody answers at ")])
def test_the_command_says_so_without_a_traceback_and_with_the_code_that_is_tried_again(tmp_path, rank, given):
    tree = tiny.recipe(tmp_path).model_dump(mode="json", by_alias=True, exclude_none=True)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=tmp_path,
        env={**os.environ, **world, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == EXIT_UNAVAILABLE, done.stderr
    assert given in done.stderr and len(done.stderr.splitlines()) == 3 and "Traceback" not in done.stderr
