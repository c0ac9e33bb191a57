"""A server that refuses, fails or is not there, a missing file, a host without a network: each is an error of its own."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from windlass.data.config import SourceConfig
from windlass.data.sources.fetch import fetch
from windlass.data.sources.scan import scan
from windlass.data.sources.urls import is_of_a_library, refused_url
from windlass.errors import AbsentSource, UserError


@pytest.fixture
def server():
    """Answers everything with `.status`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"text": "a"}' if found.status == 200 else b""
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", "one")
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    found.status = 200
    found.url = f"http://127.0.0.1:{found.server_port}"
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def refused(url):
    with pytest.raises(UserError) as caught:
        scan(SourceConfig(path=url), print)
    return caught.value


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl"])
@pytest.mark.parametrize(
    ("status", "said", "change"),
    [
        (401, "is refused to this process: status 401", "credentials"),
        (403, "is refused to this process: status 403", "credentials"),
        (500, "is answered with status 500", "what the server says"),
        (503, "is answered with status 503", "what the server says"),
    ],
)
def test_an_answer_that_is_an_error_is_reported_with_url_and_status_and_is_no_absent_source(
    server, name, status, said, change
):
    server.status = status
    error = refused(f"{server.url}/{name}?signature=51gn")
    assert error.given == f"{server.url}/{name}?*** {said}" and change in error.change
    assert not isinstance(error, AbsentSource) and error.code == (74 if status >= 500 else 2)


def test_what_the_server_does_not_have_is_absent(server):
    server.status = 404
    error = refused(f"{server.url}/a.jsonl")
    assert isinstance(error, AbsentSource) and error.given == f"`path: {server.url}/a.jsonl` matches no file"
    assert error.code == 2


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl"])
def test_a_port_where_nobody_listens_is_an_error_and_names_the_server(name):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = refused(f"http://127.0.0.1:{port}/{name}")
    assert f"http://127.0.0.1:{port}/{name}: Cannot connect to host 127.0.0.1:{port}" in error.given
    assert "the server" in error.change and not isinstance(error, AbsentSource) and error.code == 74


def test_a_host_without_a_network_lacks_the_source(monkeypatch):
    def no_names(*args, **kwargs):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_names)
    error = refused("http://data.example/a.jsonl")
    assert isinstance(error, AbsentSource)
    assert error.given.startswith("http://data.example/a.jsonl cannot be reached from this host: ")
    assert "copy what was prepared" in error.change and error.code == 74


def test_a_source_that_was_there_when_it_was_looked_for_is_not_absent_later(server, tmp_path):
    config = SourceConfig(path=f"{server.url}/a.jsonl")
    files = scan(config, print)
    for status in (404, 503):
        server.status = status
        with pytest.raises(UserError) as caught:
            fetch(config, files, tmp_path / str(status), print)
        assert not isinstance(caught.value, AbsentSource) and caught.value.code == (2 if status == 404 else 74)


def test_a_missing_package_and_credentials_are_errors_and_our_own_mistakes_keep_their_traceback(monkeypatch):
    def no_package(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", no_package)
    error = refused("s3://bucket/a.jsonl")
    assert error.given == "s3://bucket/a.jsonl: Install s3fs to access S3"
    assert error.change == "pip install 'windlass-lm[s3]'" and not isinstance(error, AbsentSource)
    denied = refused_url("s3://bucket/a.jsonl", PermissionError("Forbidden"))
    assert denied.given == "s3://bucket/a.jsonl is refused to this process: Forbidden"
    assert not isinstance(denied, AbsentSource)
    hidden = refused_url("https://host/a.jsonl?***", ValueError("Invalid pattern"))
    assert hidden.given == "https://host/a.jsonl?*** has *** where its secret was" and "${NAME}" in hidden.change
    assert is_of_a_library(json.JSONDecodeError("x", "y", 0)) and not is_of_a_library(KeyError("size"))


def test_credentials_that_are_missing_are_an_error_of_the_library_and_said(monkeypatch):
    exceptions = pytest.importorskip("botocore.exceptions")

    def no_credentials(*args, **kwargs):
        raise exceptions.NoCredentialsError

    monkeypatch.setattr(fsspec, "url_to_fs", no_credentials)
    error = refused("s3://bucket/a.jsonl")
    assert error.given == "s3://bucket/a.jsonl: Unable to locate credentials" and "credentials" in error.change
    assert not isinstance(error, AbsentSource)
