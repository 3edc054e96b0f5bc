"""What every fake process does: follow its entry in the script, speaking the status protocol.

The script is a JSON file named by FAKE_SCRIPT: {process name: {"stages": [[name, share]], "error": "...", "help": "",
"crash": "text", "starts": [{...}, ...] (one a start), "wait_for": path, "drain_until": path, "child": true,
"ignore_term": true or the first so many, "no_worker_while": path}}. Waiting for a file instead of a time lets a test
hold a process at a point.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 60.0


class Fake:
    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--boot", required=True)
        self.boot = json.loads(Path(parser.parse_args().boot).read_text())
        self.name = self.boot["name"]
        script = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
        self.count = self._count()
        self.plan = script.get(self.name, {})
        starts = self.plan.get("starts")
        if starts:
            self.plan = starts[min(self.count, len(starts)) - 1]
        self.is_ended = False
        self.terms = 0
        signal.signal(signal.SIGTERM, self._on_term)

    def _count(self):
        file = Path(self.boot["state_dir"]) / f"starts.{self.name}"
        count = int(file.read_text()) + 1 if file.exists() else 1
        file.write_text(str(count))
        return count

    def _on_term(self, *_):
        print(f"{self.name} got SIGTERM", flush=True)
        self.terms += 1
        ignored = self.plan.get("ignore_term", 0)
        if ignored is not True and self.terms > ignored:
            self.is_ended = True

    def say(self, **record):
        os.write(self.boot["status_fd"], json.dumps(record).encode() + b"\n")

    def load(self):
        print(f"{self.name} start {self.count}", flush=True)
        if self.plan.get("child"):
            # A helper in a session of its own: out of its parent's group, inside the run all the same.
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            (Path(self.boot["state_dir"]) / f"helper.{self.name}").write_text(str(helper.pid))
        for stage, share in self.plan.get("stages", [["weights", 0.5], ["warm-up", 0.9]]):
            self.say(stage=stage, share=share)
        self.hold(self.plan.get("wait_for"))
        if "crash" in self.plan:
            raise RuntimeError(self.plan["crash"])
        if "error" in self.plan:
            self.say(error=self.plan["error"], help=self.plan.get("help", ""))
            sys.exit(1)
        affinity = sorted(os.sched_getaffinity(0))
        names = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "PDCTL_RUN_ID")
        self.say(ready=True, detail={"cpus": affinity, "env": {name: os.environ.get(name) for name in names}})

    def hold(self, path):
        deadline = time.monotonic() + LIMIT_S
        while path and not Path(path).exists() and not self.is_ended and time.monotonic() < deadline:
            time.sleep(0.01)

    def serve(self):
        deadline = time.monotonic() + LIMIT_S
        while not self.is_ended and time.monotonic() < deadline:
            time.sleep(0.02)
        self.hold(self.plan.get("drain_until"))


def main():
    fake = Fake()
    fake.load()
    fake.serve()
