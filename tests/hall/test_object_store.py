"""Every way in which a store fails ends within the deadline, with an error that names the URL and no secret."""

import errno
import http.server
import socket
import subprocess
import sys
import threading

import pytest

from windlass.errors import UserError
from windlass.object_store import Store


class Clock:
    """Stands in for the module `time` in the store: sleeping moves it, and nothing else does."""

    def __init__(self):
        self.slept_s = []

    def monotonic(self):
        return sum(self.slept_s)

    def sleep(self, seconds):
        self.slept_s.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("windlass.object_store.time", made)
    return made


PAUSES_OF_4_S = [0.25, 0.5, 1.0, 2.0, 0.25]


def refused(call):
    with pytest.raises(UserError) as caught:
        call()
    return caught.value


@pytest.fixture(params=["s3", "file", "memory"])
def url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3_place")[0]
    return {"file": f"file://{tmp_path}/deep/er", "memory": f"memory://{tmp_path}"}[request.param]


def test_files_go_in_and_come_out_whole(url, tmp_path):
    store = Store(url, 20)
    assert store.sizes() == {}
    with pytest.raises(FileNotFoundError):
        store.read("a")
    (tmp_path / "source").write_bytes(bytes(range(256)) * 5000)
    store.write("sets/train/a", tmp_path / "source")
    store.write("b", b"one")
    store.write("b", b"other")
    assert store.read("b") == b"other" and store.read("sets/train/a") == (tmp_path / "source").read_bytes()
    assert store.sizes() == {"sets/train/a": 1_280_000, "b": 5}
    store.remove(["b", "never"])
    assert store.sizes() == {"sets/train/a": 1_280_000}


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_named_at_once_and_not_printed(s3_place, monkeypatch, clock, variable):
    Store(s3_place[0], 20).write("a", b"x")
    monkeypatch.setenv(variable, "wr0ng-credential")
    store = Store(s3_place[0], 60)
    for call in (lambda: store.read("a"), lambda: store.write("a", b"y"), store.sizes):
        error = refused(call)
        assert s3_place[0] in error.given and "credentials come from the environment" in error.rule
        assert clock.slept_s == []
        assert "wr0ng-credential" not in str(error) and "AWS_SECRET_ACCESS_KEY" in error.change


def test_absent_credentials_are_named(s3_place, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    error = refused(lambda: Store(s3_place[0], 20).read("a"))
    assert "Unable to locate credentials" in error.given


def test_a_missing_bucket_is_named(s3_place):
    store = Store("s3://no-such-bucket/x", 20)
    with pytest.raises(FileNotFoundError):
        store.read("a")
    error = refused(lambda: store.write("a", b"x"))
    assert "s3://no-such-bucket/x/a cannot be written" in error.given and "not buckets" in error.rule


@pytest.mark.parametrize("endpoint", ["http://no-such-host.invalid:9", "refused"])
def test_a_server_that_is_not_there_is_tried_until_the_deadline(s3_place, monkeypatch, clock, endpoint):
    if endpoint == "refused":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    error = refused(lambda: Store(s3_place[0], 4).read("train/shard.00003.mds"))
    assert f"{s3_place[0]}/train/shard.00003.mds failed for 4 s (data.cache.deadline_s)" in error.given
    assert "EndpointConnectionError" in error.given and error.code == 74 and clock.slept_s == PAUSES_OF_4_S


def test_a_server_that_never_answers_does_not_block():
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = refused(lambda: Store(f"http://127.0.0.1:{server.getsockname()[1]}/x", 1).read("a"))
    assert "/x/a failed for 1 s" in error.given and "no answer" in error.given


def test_a_process_ends_although_an_operation_is_stuck():
    code = (
        "import socket, sys\n"
        "from windlass.object_store import Store\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    try:\n"
        "        Store(f'http://127.0.0.1:{server.getsockname()[1]}/x', 0.5).read('a')\n"
        "    except Exception as error:\n"
        "        sys.exit(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "Unavailable"


class Dying(http.server.BaseHTTPRequestHandler):
    """Promises 1 MB, sends half, and hangs up."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 20))
        self.end_headers()
        self.wfile.write(bytes(1 << 19))

    def log_message(self, *_):
        pass


def test_a_body_that_breaks_off_is_an_error_never_short_data(clock):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = refused(lambda: Store(f"http://127.0.0.1:{server.server_port}/x", 4).read("a"))
        server.shutdown()
    assert "/x/a failed for 4 s" in error.given and "Payload" in error.given and clock.slept_s == PAUSES_OF_4_S


def test_what_passes_is_tried_again(monkeypatch, clock):
    store = Store("memory://again", 20)
    store.write("a", b"x")
    read, failures = store._fs.cat_file, [ConnectionResetError("reset"), OSError(errno.EIO, "broken"), TimeoutError()]
    monkeypatch.setattr(store._fs, "cat_file", lambda path: read(path) if not failures else _raise(failures.pop()))
    assert store.read("a") == b"x" and failures == [] and clock.slept_s == [0.25, 0.5, 1.0]


def _raise(error):
    raise error


def test_a_write_that_arrives_short_is_seen(monkeypatch, clock):
    store = Store("memory://short", 4)
    write = store._fs.pipe_file
    monkeypatch.setattr(store._fs, "pipe_file", lambda path, data: write(path, data[:-1]))
    calls = []
    monkeypatch.setattr(store._fs, "invalidate_cache", lambda: calls.append(1))
    error = refused(lambda: store.write("a", b"abc"))
    assert "2 of 3 bytes arrived" in error.given and clock.slept_s == PAUSES_OF_4_S and 5 <= len(calls) <= 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_place_is_named_at_once(monkeypatch, clock, number):
    store = Store("memory://full", 60)
    monkeypatch.setattr(store._fs, "pipe_file", lambda *_: _raise(OSError(number, "no room")))
    error = refused(lambda: store.write("a", b"abc"))
    assert "memory://full/a: " in error.given and "free space" in error.change and clock.slept_s == []


def test_a_place_that_cannot_be_written_says_so(monkeypatch, clock):
    error = refused(lambda: Store("https://host.invalid/x", 60).write("a", b"x"))
    assert "https://host.invalid/x is read only here" in error.given
    store = Store("memory://x", 60)
    monkeypatch.setattr(store._fs, "pipe_file", lambda *_: _raise(NotImplementedError()))
    error = refused(lambda: store.write("a", b"x"))
    assert "memory://x/a cannot be written by this protocol" in error.given and clock.slept_s == []


def test_an_unknown_protocol_and_a_missing_package_are_named(monkeypatch):
    error = refused(lambda: Store("tape://reel/x", 5))
    assert "tape://reel/x" in error.given and "fsspec opens" in error.rule
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    error = refused(lambda: Store("s3://bucket/x", 5))
    assert "the package for s3:// is not installed" in error.given and error.change.endswith("'windlass-lm[s3]'")


def test_a_store_names_its_url_without_secrets():
    assert Store("memory://u:p@x/y?token=1", 1).url == "memory://***@x/y?***"


def test_a_large_file_has_longer_and_a_message_names_no_key_where_there_is_none(tmp_path, clock, monkeypatch):
    store = Store(f"file://{tmp_path}", 4, setting=None, bytes_per_s=100.0)
    monkeypatch.setattr(store._fs, "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("busy")))
    for num_bytes, seconds in ((0, 4), (600, 10)):
        clock.slept_s.clear()
        error = refused(lambda num_bytes=num_bytes: store.write("a", bytes(num_bytes)))
        assert sum(clock.slept_s) == seconds and f"failed for {seconds} s; last" in error.given
        assert "raise" not in error.change
