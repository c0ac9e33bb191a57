"""The served page: who may ask it, what it answers, and what it sends while a run goes on."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.page.serve import Live, open_server


@pytest.fixture
def log(tmp_path):
    log = EventLog(tmp_path / "mine" / "events.jsonl")
    log.write("start", 0, {})
    log.write("step", 1, {"loss": 4.0})
    return log


@pytest.fixture
def ask(log, tmp_path):
    """ask(path, **headers) -> (status, headers, body), below the token; `ask.port`, `ask.token`."""
    server, address = open_server(Live([tmp_path / "mine"]))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    host, port, token = re.fullmatch(r"http://([\d.]+):(\d+)/([\w-]{20,})/", address).groups()

    def ask(path, method="GET", raw=False, **headers):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request(method, path if raw else f"/{token}/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()

    ask.port, ask.token = int(port), token
    yield ask
    server.shutdown()
    server.server_close()


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_asks_its_own_origin_alone(ask):
    status, headers, page = ask("")
    assert status == 200 and headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    policy = re.search(r'Security-Policy"\s+content="([^"]*)"', page)[1]
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
    assert data_of(page)["live"] == {"path": "news", "every_ms": 2000}


@pytest.mark.parametrize(
    "path", ["/", "/news", "/wrong/", "/{token}", "/{token}/events.jsonl", "/{token}/../", "/{token}/news/x"]
)
def test_without_the_token_there_is_nothing(ask, path):
    status, _, body = ask(path.format(token=ask.token), raw=True)
    assert status == 404 and "loss" not in body


def test_a_request_by_another_name_is_refused(ask):
    assert ask("", Host="evil.example")[0] == 403 and ask("", Host=f"localhost:{ask.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_only_read(ask, method):
    assert ask("news", method=method)[0] == 501


def test_it_listens_on_loopback_alone(ask):
    server, _ = open_server(Live([]))
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()


def have_of(data):
    return "_".join(f"{run['offset']}.{run['revision']}.{len(run['grid']['step'])}" for run in data["runs"])


def test_only_what_is_new_is_sent(ask, log):
    first = data_of(ask("")[2])
    assert ask(f"news?have={have_of(first)}")[0] == 204
    log.write("step", 2, {"loss": 3.0})
    log.write("validation", 2, {"name": "val", "loss": 3.5})
    status, _, body = ask(f"news?have={have_of(first)}")
    news = json.loads(body)
    (run,) = news["runs"]
    assert status == 200 and run["from"] == 0, "the last bucket may have grown"
    assert run["grid"]["step"] == [1, 2] and run["series"]["loss"]["y"] == [4.0, 3.0]
    assert run["points"]["val"] == {"step": [2], "y": [3.5]} and "3.5000" in news["parts"]["tiles"]
    for step in range(3, 30):
        log.write("step", step, {"loss": 2.0})
    held = json.loads(ask(f"news?have={have_of(first)}")[2])
    log.write("step", 30, {"loss": 1.0})
    run = json.loads(ask(f"news?have={have_of(held)}")[2])["runs"][0]
    assert run["from"] == 28 and run["grid"]["step"] == [29, 30] and run["series"]["loss"]["y"] == [2.0, 1.0]


@pytest.mark.parametrize("have", ["", "x", "1.2", "-5.x.1", "9.9.9_9.9.9", "0.0.99999999999999999999"])
def test_who_says_nonsense_gets_all(ask, have):
    status, _, body = ask(f"news?have={have}")
    assert status == 200 and json.loads(body)["runs"][0]["grid"]["step"] == [1]


def test_a_resume_sends_the_curve_anew(ask, log):
    for step in range(2, 10):
        log.write("step", step, {"loss": 3.0})
    held = json.loads(ask("news?have=")[2])
    log.write("resume", 4, {})
    log.write("step", 5, {"loss": 1.0})
    run = json.loads(ask(f"news?have={have_of(held)}")[2])["runs"][0]
    assert run["from"] == 0 and run["grid"]["step"] == [1, 2, 3, 4, 5] and run["series"]["loss"]["y"][-1] == 1.0


def test_a_run_that_is_deleted_meanwhile_is_said(ask, log, tmp_path):
    (tmp_path / "mine" / "events.jsonl").unlink()
    assert ask("news?have=")[0] == 503
    log.write("start", 0, {})
    assert ask("news?have=")[0] == 200


def test_a_port_that_is_taken_is_refused(log, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use"):
            open_server(Live([tmp_path / "mine"]), port)


def test_the_command_says_its_address_and_ends_with_ctrl_c(log, tmp_path):
    command = [sys.executable, "-m", "windlass", "report", str(tmp_path / "mine"), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        address = process.stdout.readline().split()[0]
        port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", address).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", path)
        assert "mine - windlass" in connection.getresponse().read().decode()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["events.jsonl"], "nothing is written"
