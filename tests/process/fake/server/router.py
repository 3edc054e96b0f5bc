"""A fake router: enough HTTP on the inherited socket for `status` and `smoke`."""

import http.server
import json
import socket
import threading
from pathlib import Path

from server._fake import Fake


class Handler(http.server.BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "fake"}]})
        elif self.path == "/admin/state":
            secret = Path(self.fake.boot["secret_file"]).read_text().strip()
            if self.headers["Authorization"] != f"Bearer {secret}":
                self._answer(401, {"error": {"message": "wrong key"}})
            else:
                load = {"waiting": 1, "running": 2, "blocks_total": 100, "blocks_used": 40}
                workers = [{"name": name, "state": "connected", "load": load} for name in self.fake.boot["addresses"]]
                self._answer(200, {"router": {"state": self._state(), "waiting": 3, "running": 4}, "workers": workers})
        else:
            self._answer(404, {"error": {"message": "no such page"}})

    def _state(self):
        file = self.fake.plan.get("no_worker_while")
        return "no worker" if file and Path(file).exists() else "ready"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_long = len(body["messages"][0]["content"]) > 500
        record = {
            "path": "pd" if is_long else "colocated",
            "kv_bytes": self.fake.plan.get("kv_bytes", 4096),
            "queue_ms": 0.5,
        }
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for delta, reason in (("Pa", None), ("ris", "stop")):
                event = {
                    "id": "c1",
                    "choices": [{"delta": {"content": delta}, "finish_reason": reason}],
                    "pdctl": record,
                }
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            return
        choice = {"message": {"content": "Paris"}, "finish_reason": "stop"}
        self._answer(200, {"id": "c0", "choices": [choice], "usage": {"completion_tokens": 1}, "pdctl": record})

    def _answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fd, fake):
        super().__init__(("", 0), type("Bound", (Handler,), {"fake": fake}), bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=fd)


fake = Fake()
server = Server(fake.boot["listen_fd"], fake)
threading.Thread(target=server.serve_forever, daemon=True).start()
fake.load()
fake.serve()
