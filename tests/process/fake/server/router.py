"""A fake router: enough HTTP on the inherited socket for every command. `decode-0` always has sequences open."""

import http.server
import json
import socket
import threading
from pathlib import Path
from typing import ClassVar

from server._fake import Fake
from server.viewing import view_twin

KNOB = {"now": 50, "boot": 50, "range": [1, 4096], "step": 1, "auto": False, "unit": "", "applies": "now", "help": ""}


class Handler(http.server.BaseHTTPRequestHandler):
    fake: Fake
    draining: ClassVar = set()

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "fake"}]})
        elif self.path == "/admin/state":
            if self._is_let_in(may_look=True):
                router = {"state": self._state(), "waiting": 3, "running": 4}
                self._answer(200, {"router": router, "workers": [self._worker(n) for n in self.fake.boot["addresses"]]})
        elif self.path == "/admin/knobs":
            if self._is_let_in(may_look=True):
                self._answer(200, {"rev": 1, "read_only": False, "knobs": {"router.queue_high": KNOB}})
        elif self.path == "/admin/audit":
            if self._is_let_in(may_look=True):
                self._answer(200, {"rev": 1, "entries": []})
        else:
            self._answer(404, {"error": {"message": "no such page"}})

    def _is_let_in(self, may_look=False):
        secret = Path(self.fake.boot["secret_file"]).read_bytes().strip()
        keys = [secret, view_twin(secret)] if may_look else [secret]
        if self.headers["Authorization"] not in [f"Bearer {key.decode()}" for key in keys]:
            self._answer(401, {"error": {"message": "wrong key"}})
            return False
        return True

    def _worker(self, name):
        load = {"waiting": 1, "running": 2, "blocks_total": 100, "blocks_used": 40}
        is_draining = name in self.draining
        state = "draining" if is_draining else "connected"
        return {"name": name, "state": state, "is_draining": is_draining, "open": int(name == "decode-0"), "load": load}

    def _state(self):
        file = self.fake.plan.get("no_worker_while")
        return "no worker" if file and Path(file).exists() else "ready"

    def do_PATCH(self):
        self.do_POST()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.path.startswith("/admin/"):
            if self._is_let_in():
                self._change(body)
            return
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

    def _change(self, body):
        """Knobs: 0, revision 99 and a knob of another name are refused. Workers: those there are may be drained."""
        if self.path.startswith("/admin/workers/"):
            _, _, _, name, what = self.path.split("/")
            if name not in self.fake.boot["addresses"]:
                self._refuse("UNKNOWN_WORKER")
                return
            (self.draining.add if what == "drain" else self.draining.discard)(name)
            self._answer(200, self._worker(name))
        elif 0 in body.get("values", {}).values() or body.get("rev") == 99 or "no.such" in (body.get("knobs") or []):
            self._refuse("OUT_OF_RANGE")
        else:
            self._answer(200, {"rev": 2, "dry_run": False, "changed": {}, "pending": []})

    def _refuse(self, code):
        self._answer(400, {"error": {"message": "no", "code": code}})

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
