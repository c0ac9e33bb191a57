"""`windlass report RUN... --serve`: the page from this machine, which asks this machine what is new.

It listens on the loopback interface alone, and every address begins with a random token: other users of the host, and pages of
other sites in the same browser, do not know it. A request that names another host is refused, so that no name that was made to
point here (DNS rebinding) gets an answer. Nothing is written.
"""

import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from windlass.errors import UserError
from windlass.report.page.drawn_data import drawn_data
from windlass.report.page.write import Shown, charts_of, fragments, open_run, render_page, run_names

HOST: Final = "127.0.0.1"
EVERY_MS: Final = 2000  # between two questions of the page
HAVE: Final = re.compile(r"([0-9]{1,15})\.(-?[0-9]{1,15})\.([0-9]{1,9})(?![0-9])")


class Live:
    """`runs`: those that are followed. The methods may be called from any thread."""

    def __init__(self, directories: Sequence[Path]):
        """Raises UserError where a directory holds no events, or they are not what windlass writes."""
        self.runs: list[Shown] = [open_run(directory) for directory in directories]
        self._lock = threading.Lock()

    def page(self) -> str:
        """The whole page, as it is now."""
        with self._lock:
            self._read()
            return render_page(self.runs, live={"path": "news", "every_ms": EVERY_MS})

    def news(self, have: str) -> str | None:
        """What the page has not, as JSON; None where that is nothing. `have`: per run the offset, the revision and the number of
        buckets that it has, as page.js writes them; whatever else it is, all is sent."""
        held = [tuple(map(int, found)) for found in HAVE.findall(have)]
        with self._lock:
            self._read()
            if len(held) != len(self.runs):
                held = [(-1, -1, 0)] * len(self.runs)
            pairs = list(zip(self.runs, held, strict=True))
            if all(run.history.offset == offset for run, (offset, _, _) in pairs):
                return None
            runs = [
                drawn_data(run.history, name, revision=revision, rows=rows)
                for (run, (_, revision, rows)), name in zip(pairs, run_names(self.runs), strict=True)
            ]
            return json.dumps({"charts": charts_of(self.runs), "runs": runs, "parts": fragments(self.runs)})

    def _read(self) -> None:
        for run in self.runs:
            run.history.read_new()


def open_server(live: Live, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server that is not yet serving, and the address of its page. `port` 0: any that is free. Raises UserError."""
    token = secrets.token_urlsafe(16)
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(live, token))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port {port}: {getattr(error, 'strerror', None) or error}",
            "the page is served from a free port of this machine",
            "name another port, or leave --port out: any free one is taken",
        ) from None
    server.daemon_threads = True
    return server, f"http://{HOST}:{server.server_port}/{token}/"


def serve_page(directories: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serves the page until Ctrl-C or another signal. Raises UserError before it begins."""
    server, address = open_server(Live(directories), port)
    with server:
        say(f"{address}  (Ctrl-C ends it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")


def _handler(live: Live, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "windlass", ""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            assert isinstance(self.server, ThreadingHTTPServer)
            port = self.server.server_port
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask this machine by its own name\n")
            _, first, *rest = url.path.split("/")
            if not secrets.compare_digest(first.encode(), token.encode()) or rest not in ([""], ["news"]):
                return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page; the address was printed\n")
            try:
                if rest == [""]:
                    return self._answer(HTTPStatus.OK, "text/html", live.page())
                found = live.news(parse_qs(url.query).get("have", [""])[0])
            except (UserError, OSError) as error:  # the run's directory is gone, or its file is damaged
                return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
            if found is None:
                return self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
            return self._answer(HTTPStatus.OK, "application/json", found)

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            headers = {
                "Content-Type": f"{kind}; charset=utf-8",
                "Cache-Control": "no-store",
                "Content-Length": len(body),
            }
            headers |= {
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "X-Frame-Options": "DENY",
            }
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """No line per request: the page asks every other second."""

    return Handler
