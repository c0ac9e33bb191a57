"""A Hugging Face hub on this machine: what huggingface_hub 2.4 asks of the real one, answered as the real one does.

Small files are answered at once, safetensors are redirected to a content store (as LFS files are), errors carry the hub's
X-Error-Code. Every answer is recorded with the bytes of its body that were sent, so that a test can count them.
"""

import base64
import hashlib
import json
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

LARGE = ".safetensors"


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    gated: bool = False
    private: bool = False

    def commit(self, revision):
        return revision if revision in self.commits else self.revisions.get(revision)


@dataclass
class Answer:
    method: str
    path: str
    status: int
    sent_bytes: int


@dataclass
class Hub:
    """`repositories` by name, `moved` from old to new name, `cut`: file -> bytes of its body after which the line dies (one
    entry per time), `token`: the one that may read what is gated or private, `down`: 503 for everything, `failing`: files
    that are answered by 503, `slow_s`: how long large files take, `uploaded`: large files of a push, by their hash,
    `refused_writes`: part of a path -> the status that a push gets there, `refused_uploads`: the store takes no large file."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    token: str = "hf_member"
    down: bool = False
    failing: set[str] = field(default_factory=set)
    slow_s: float = 0.0
    uploaded: dict[str, bytes] = field(default_factory=dict)
    refused_writes: dict[str, int] = field(default_factory=dict)
    refused_uploads: bool = False
    answers: list[Answer] = field(default_factory=list)
    endpoint: str = ""

    def add(self, name, files, branch="main", **traits):
        """A new commit of `name` with these files, at the tip of `branch` -> its id."""
        found = self.repositories.setdefault(name, Repository({}, {}))
        for trait, value in traits.items():
            setattr(found, trait, value)
        contents = {
            path: content if isinstance(content, bytes) else content.encode() for path, content in files.items()
        }
        commit = hashlib.sha1(repr((name, len(found.commits), sorted(contents.items()))).encode()).hexdigest()
        found.commits[commit], found.revisions[branch] = contents, commit
        return commit

    def add_directory(self, name, directory: Path, branch="main", **traits):
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        return self.add(name, files, branch, **traits)

    def served(self, file, method="GET"):
        """Bytes of `file` that were sent, one number per answer that held some."""
        content = set(self.paths_of(file))
        return [a.sent_bytes for a in self.answers if a.method == method and a.path in content and a.sent_bytes]

    def paths_of(self, file):
        for name, repository in self.repositories.items():
            for commit, files in repository.commits.items():
                if file in files:
                    yield f"/{name}/resolve/{commit}/{file}"
                    yield f"/store/{hashlib.sha256(files[file]).hexdigest()}"

    def __enter__(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        self._route()

    def do_HEAD(self):
        self._route()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if "paths-info" in path:
            self._paths(path, urllib.parse.parse_qs(body.decode())["paths"])
        elif self.hub.down:
            self._answer(503)
        elif path == "/api/validate-yaml":
            self._json(200, {"warnings": [], "errors": []})
        else:
            self._write(path, body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.uploaded[hashlib.sha256(body).hexdigest()] = body
        self._answer(200 if not self.hub.refused_uploads else 507)

    def _write(self, path, body):
        """What a push asks, in its order: a repository, how each file is to come, where the large ones go, the commit."""
        token, refused = (self.headers.get("Authorization") or "").removeprefix("Bearer "), self.hub.refused_writes
        status = 401 if token == "hf_invalid" else 403 if token != self.hub.token else None
        status = status or next((refused[part] for part in refused if part in path), None)
        if status is not None:
            self._answer(status, {"X-Error-Message": f"not you, {token}"[:8]})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_there = name in self.hub.repositories
            if not is_there:
                self.hub.add(name, {}, private=asked.get("visibility") == "private")
            self._json(409 if is_there else 200, {"url": f"{self.hub.endpoint}/{name}"})
        elif "/preupload/" in path:
            modes = [
                (file["path"], "lfs" if file["path"].endswith(LARGE) else "regular")
                for file in json.loads(body)["files"]
            ]
            self._json(200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._json(200, {"objects": objects, "transfer": "basic"})
        else:
            self._commit("/".join(path.split("/")[3:5]), [json.loads(line) for line in body.splitlines()])

    def _commit(self, name, lines):
        repository = self.hub.repositories[name]
        files = dict(repository.commits[repository.revisions["main"]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(name, files)
        self._json(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def _json(self, status, value):
        self._answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _paths(self, path, asked):  # which paths of a dataset there are, and what they are
        _, _, *name, _, revision = path.strip("/").split("/")
        files = self.hub.repositories["datasets/" + "/".join(name)]
        listed = self._entries(files.commits[files.commit(revision)])
        self._json(200, [entry for entry in listed if entry["path"] in asked])

    def log_message(self, *_):
        pass

    def _route(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if self.hub.down or parts[-1] in self.hub.failing:
            self._answer(503)
        elif parts[0] == "store" and parts[1] == "api":  # what a portal or a wrong address says to everything
            self._answer(200, {"Content-Type": "text/html"}, b"<html>welcome</html>")
        elif parts[0] == "store":
            if self.command == "GET":
                time.sleep(self.hub.slow_s)
            self._content(next(c for c in self._contents() if hashlib.sha256(c).hexdigest() == parts[1]), {})
        elif parts[:2] in (["api", "models"], ["api", "datasets"]):
            name = "/".join(parts[2:4]) if parts[1] == "models" else "/".join(parts[1:4])
            if self._is_open(name, path, is_file=False):
                kind, rest = (parts[4], "/".join(parts[5:])) if len(parts) > 4 else ("revision", "main")
                self._describe(name, kind, rest)
        else:
            split = 3 if parts[0] == "datasets" else 2
            name = "/".join(parts[:split])
            if self._is_open(name, path, is_file=True):
                self._file(name, parts[split + 1], "/".join(parts[split + 2 :]))

    def _entries(self, files):
        """Files and the folders that they are in, as a tree lists them."""
        folders = {"/".join(path.split("/")[:n]) for path in files for n in range(1, path.count("/") + 1)}
        found = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
        return found + [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]

    def _contents(self):
        return [c for r in self.hub.repositories.values() for files in r.commits.values() for c in files.values()]

    def _is_open(self, name, path, is_file):
        """Whether the repository is there for this token; else it has been answered."""
        if name in self.hub.moved:
            self._answer(307, {"Location": path.replace(name, self.hub.moved[name], 1)})
            return False
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        found = self.hub.repositories.get(name)
        if token == "hf_invalid":
            self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif found is None or (found.private and token != self.hub.token):
            self._answer(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        elif found.gated and is_file and token != self.hub.token:
            self._answer(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        else:
            return True
        return False

    def _describe(self, name, kind, revision):
        found = self.hub.repositories[name]
        revision, _, below = revision.partition("/") if kind == "tree" else (revision, "", "")
        commit = found.commit(revision)
        if commit is None:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            prefix = f"{below}/" if below else ""
            deep = "recursive=True" in self.path or "recursive=true" in self.path or not name.startswith("datasets/")
            listed = [entry for entry in self._entries(found.commits[commit]) if entry["path"].startswith(prefix)]
            listed = [entry for entry in listed if deep or "/" not in entry["path"][len(prefix) :]]
            self._answer(200, {"Content-Type": "application/json"}, json.dumps(listed).encode())
        else:
            info = {
                "id": name.removeprefix("datasets/"),
                "sha": commit,
                "private": found.private,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            info["siblings"] = [{"rfilename": path} for path in found.commits[commit]]
            self._answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _file(self, name, revision, file):
        found = self.hub.repositories[name]
        commit = found.commit(revision)
        if commit is None:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        content = found.commits[commit].get(file)
        if content is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif file.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "X-Repo-Commit": commit}
            self._answer(302, {**linked, "Location": f"http://localhost:{self.server.server_port}/store/{digest}"})
        else:
            self._content(content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _content(self, content, headers):
        begin, end, status = 0, len(content), 200
        asked = self.headers.get("Range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, size, end = int(first), end, min(end, int(last) + 1) if last else end
            headers, status = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}, 206
        cuts = next((self.hub.cut[f] for f in self.hub.cut if self._names(f, content) and self.command == "GET"), [])
        sent = content[begin:end]
        sent = sent[: cuts.pop(0)] if cuts else sent
        self._answer(status, {**headers, "Content-Length": str(end - begin)}, sent)
        if len(sent) < end - begin:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)

    def _names(self, file, content):
        return any(files.get(file) == content for r in self.hub.repositories.values() for files in r.commits.values())

    def _answer(self, status, headers=None, body=b""):
        is_head = self.command == "HEAD"
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.answers.append(Answer(self.command, path, status, 0 if is_head else len(body)))
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if not is_head:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process's huggingface_hub asks, with an empty cache and no token, and without waiting between tries."""
    from huggingface_hub import close_session, constants

    with Hub() as served:
        url = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {
            "ENDPOINT": served.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": url,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for module in ("file_download", "utils._http"):
            monkeypatch.setattr(f"huggingface_hub.{module}.time.sleep", lambda _s: None)
        yield served
        close_session()
