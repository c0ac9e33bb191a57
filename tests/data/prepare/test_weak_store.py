"""A store that is slow, refuses every third request and breaks answers off: what is prepared from it and in it is the same."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.data.conftest import data_config
from tests.data.prepare.conftest import write_rows
from tests.data.prepare.test_part import join, make_part
from tests.data.prepare.test_prepare import content, quietly
from tests.data.shards.test_remote import remote_config
from windlass.data.prepare.part import prepare_tokenizer
from windlass.data.prepare.prepare import open_prepared
from windlass.data.shards.mds import Reader
from windlass.object_store import Store

PAUSE_S = 0.02
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class Weak(ThreadingHTTPServer):
    """In front of a store. Each request is slow, every third is refused, and of the others that read a file every second is
    answered by a half of it.

    `refused`, `broken`: how many were."""

    daemon_threads = True

    def __init__(self, endpoint: str):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.behind, self.lock = urlsplit(endpoint), threading.Lock()
        self.requests = self.refused = self.reads = self.broken = 0

    def is_refused(self) -> bool:
        with self.lock:
            self.requests += 1
            self.refused += self.requests % 3 == 0
            return self.requests % 3 == 0

    def is_broken(self) -> bool:
        with self.lock:
            self.reads += 1
            self.broken += self.reads % 2 == 0
            return self.reads % 2 == 0


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(PAUSE_S)
        if self.server.is_refused():
            self.send_response(503)
            self.send_header("Content-Length", str(len(SLOW_DOWN)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(SLOW_DOWN)
            return
        behind = http.client.HTTPConnection(self.server.behind.hostname, self.server.behind.port)
        behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            behind.putheader(name, value)
        behind.endheaders(body)
        answer = behind.getresponse()
        held = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        size = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(held))
        self.send_header("Content-Length", size)
        self.end_headers()
        is_file = (
            self.command == "GET" and "list-type" not in self.path and answer.status in (200, 206) and len(held) > 1
        )
        if is_file and self.server.is_broken():
            self.wfile.write(held[: len(held) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(held)
        behind.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, *_given: object) -> None:
        pass


@pytest.fixture
def weak(s3_session, s3_place, monkeypatch):
    """(the server in front, the store's URL)"""
    server = Weak(s3_session[0]["AWS_ENDPOINT_URL"])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    yield server, s3_place[0]
    server.shutdown()
    server.server_close()


@pytest.mark.long
def test_prepared_in_parts_and_joined_and_read_it_is_what_a_good_store_gives(weak, small, tmp_path):
    server, url = weak
    write_rows(tmp_path / "a.jsonl", 30, 3)
    tokenizer = {"from": str(small[1].tokenizer_directory)}
    config = data_config(tmp_path, sources=[{"path": str(tmp_path / "a.jsonl")}], tokenizer=tokenizer)
    whole = quietly(config)
    store = Store(f"{url}/in", 60)
    store.write("a.jsonl", tmp_path / "a.jsonl")
    far = data_config(
        tmp_path, sources=[{"path": f"{url}/in/a.jsonl"}], tokenizer=tokenizer, directory=str(tmp_path / "parts")
    )
    prepare_tokenizer(far, {}, log=lambda line: None)  # fetches, too
    for number in range(3):
        make_part(far, number, 3)
    joined = join(far)
    for name in ("train", "validation"):
        assert content(joined.directory / name) == content(whole.directory / name)
    there = remote_config(far, f"{url}/out", tmp_path / "cache")
    quietly(there)
    found = open_prepared(there, {})
    for name in ("train", "validation"):
        pairs = zip(Reader(found.shards(name)), Reader(whole.shards(name)), strict=True)
        assert all((one[0] == two[0]).all() and (one[1] == two[1]).all() for one, two in pairs)
    assert server.refused > 10 and server.broken > 5
