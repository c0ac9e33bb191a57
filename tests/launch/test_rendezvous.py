"""Where agents meet: they leave and come again, and one ends it for all."""

import os
import socket
import socketserver
import threading

import pytest

from tests.ports import silent_port
from windlass.errors import Unavailable, UserError
from windlass.launch.rendezvous import MeetingPlace, address_towards, too_few


@pytest.fixture
def endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"localhost:{free.getsockname()[1]}"


def test_a_host_that_was_started_otherwise_is_refused_and_named(endpoint, capsys):
    facts = {"--nodes": "2:3", "--nproc": 1, "windlass": "1"}
    MeetingPlace(2, 3, endpoint, facts)
    again = MeetingPlace(2, 3, endpoint, facts)
    with pytest.raises(UserError) as caught:
        MeetingPlace(2, 3, endpoint, {**facts, "--nproc": 2, "windlass": "2"})
    here = socket.gethostname()
    assert caught.value.given == f"--nproc 2, windlass 2 on {here}, --nproc 1, windlass 1 on {here}"
    assert again.start()["local_addr"] == address_towards(endpoint) == "localhost"
    assert capsys.readouterr().out == f"windlass: waiting at {endpoint}: a start needs 2 hosts\n"


def test_a_host_alone_meets_leaves_and_comes_again_until_the_end(endpoint):
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousParameters

    meeting = MeetingPlace(1, 1, endpoint, {})
    rounds = []
    for _ in range(2):
        handler = meeting._handler(RendezvousParameters("windlass", endpoint, "windlass", 1, 1, "localhost"))
        assert handler.next_rendezvous().world_size == 1 and handler.num_nodes_waiting() == 0
        assert [meeting.is_first("incident") for _ in range(2)] == [True, False]
        rounds.append(handler.joined)
        handler.shutdown()
    assert rounds == [0, 1]
    assert [meeting.end(3), meeting.end(0)] == [3, 3], "the code of the host that ended it first"
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_ranks_are_ended_a_while_after_a_host_of_theirs_is_gone(endpoint, monkeypatch):
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from windlass.launch import rendezvous

    ended = []
    monkeypatch.setattr(rendezvous, "end_children", lambda: ended.append(os.getpid()))
    meeting = MeetingPlace(1, 1, endpoint, {})
    handler = meeting._handler(RendezvousParameters("windlass", endpoint, "windlass", 1, 1, "localhost"))
    handler.next_rendezvous()
    handler.hosts = 2  # of which one has left
    assert handler.num_nodes_waiting() == 0 and not ended, "they may be saving"
    handler._alone_since_s -= rendezvous.GRACE_S
    assert handler.num_nodes_waiting() == 0 and ended == [os.getpid()]


@pytest.mark.parametrize(
    ("host", "end"),
    [("127.0.0.1", ""), ("node-1.invalid", ": node-1.invalid has no address here (Name or service not known)")],
)
def test_an_endpoint_that_nobody_serves_is_waited_for_and_named(monkeypatch, capsys, host, end):
    import socket

    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    from windlass.launch import rendezvous

    tried = []

    def refuse(params):
        tried.append(params.endpoint)
        raise RendezvousConnectionError("nobody")

    def resolve(host, *_, **__):
        if host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(rendezvous, "create_backend", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(Unavailable) as caught:
        MeetingPlace(2, 3, f"{host}:29400", {}, join_s=1)
    assert caught.value.code == 74 and caught.value.given == f"--endpoint {host}:29400: nobody answered for 1 s{end}"
    assert "the run goes on from its last commit" in caught.value.change and len(tried) > 1
    assert capsys.readouterr().out.count(f"waiting for the store at {host}:29400: nobody answers{end}\n") == 1


def test_hosts_that_do_not_come_are_waited_for_and_counted(endpoint):
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters, RendezvousTimeoutError

    meeting = MeetingPlace(2, 3, endpoint, {}, join_s=1)
    handler = meeting._handler(RendezvousParameters("windlass", endpoint, "windlass", 2, 3, "localhost"))
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()
    error = too_few(2, meeting.join_s)
    assert (error.code, error.given) == (74, "fewer than 2 hosts for 1 s") and "from its last commit" in error.change


def test_a_port_that_another_program_has_is_named_and_nothing_of_torch_is_printed(capfd, monkeypatch):
    monkeypatch.setattr("windlass.launch.rendezvous.time.sleep", lambda _: None)
    monkeypatch.setattr("windlass.launch.rendezvous.ANSWER_S", 1)

    class Closes(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Closes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(UserError) as caught:
            MeetingPlace(2, 2, endpoint, {})
        server.shutdown()
    assert caught.value.given == f"--endpoint {endpoint}: the program that answers there is not a store of windlass"
    assert f"ss -ltnp sport = :{server.server_address[1]}" in caught.value.change
    said = capfd.readouterr()
    assert said.err == "" and said.out.count("nobody answers") == 1


def test_a_program_that_listens_and_says_nothing_is_not_waited_for(capfd, monkeypatch):
    from windlass.launch import rendezvous

    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.5)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: None)
    port = silent_port()
    with pytest.raises(Unavailable) as caught:
        MeetingPlace(2, 2, f"127.0.0.1:{port}", {})
    assert caught.value.code == 74
    assert caught.value.given == f"--endpoint 127.0.0.1:{port}: what listens there answered nothing for 2 s"
    assert f"`ss -ltnp sport = :{port}` on that host" in caught.value.change
    assert (
        capfd.readouterr().out
        == f"windlass: waiting for the store at 127.0.0.1:{port}: what listens there says nothing\n"
    )


def test_only_tries_in_succession_count(monkeypatch):
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    from windlass.launch import rendezvous
    from windlass.signals import TooLate

    class Found(dict):
        def set_timeout(self, _):
            pass

        def compare_set(self, _key, _empty, own):
            return own

    late, other = TooLate(), RendezvousConnectionError("no store")
    outcomes = [late, late, other, other, late, late, other, other, ("backend", Found())]

    def in_time(_work, _seconds):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(rendezvous, "in_time", in_time)
    monkeypatch.setattr(rendezvous, "_is_taken", lambda _: True)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: None)
    assert MeetingPlace(2, 2, "127.0.0.1:7", {})._backend == "backend" and not outcomes
