"""A server of Weights & Biases on this machine: what `wandb sync` of wandb 0.31 asks of the real one, answered as far as a run's
history needs it. The reader of the offline files is wandb's own; this keeps what it read."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT = {"id": "p", "name": "project", "entity": {"id": "e", "name": "entity"}}


class Wandb:
    """`histories`: run id -> its lines in order, each at the offset that the client gave; `names`, `configs`: the same ids."""

    def __enter__(self):
        self.histories, self.names, self.configs = {}, {}, {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"wandb": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def graphql(self, query, given):
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.address}/files/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "upsertBucket" in query:
            self.names[given["name"]] = given["displayName"] or self.names.get(given["name"])
            self.configs.setdefault(given["name"], []).append(json.loads(given["config"] or "{}"))
            return {
                "upsertBucket": {"inserted": given["name"] not in self.histories, "bucket": self.bucket(given["name"])}
            }
        if "RunResumeStatus" in query:
            known = given["name"] in self.histories
            return {"model": {**PROJECT, "bucket": self.bucket(given["name"]) if known else None}}
        return {}

    def bucket(self, run_id):
        """The run as the server has it: a client that resumes goes on behind its last line."""
        lines = self.histories.get(run_id, [])
        return {
            "id": "r", "name": run_id, "displayName": self.names.get(run_id), "description": "", "config": "{}",
            "summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": [], "notes": "",
            "historyLineCount": len(lines), "historyTail": json.dumps(lines[-1:]), "wandbConfig": "{}", "project": PROJECT,
        }  # fmt: skip

    def stream(self, run_id, files):
        lines = self.histories.setdefault(run_id, [])
        if given := files.get("wandb-history.jsonl"):
            lines[given["offset"] :] = given["content"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wandb: Wandb

    def log_message(self, *_): ...

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer = {}
        if self.path == "/graphql":
            given = json.loads(body)
            answer = {"data": self.wandb.graphql(given["query"], given["variables"])}
        elif self.path.endswith("/file_stream"):
            self.wandb.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_POST
