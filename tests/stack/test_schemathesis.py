"""schemathesis over a live stack's own /openapi.json: no 5xx, no hang, answers as documented, and the stack is well
afterwards. PDCTL_SCHEMATHESIS_S says for how long on each kind of stack."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack.harness import COLOCATED, PD, Running, eventually, running

pytest.importorskip("schemathesis")
SECONDS = int(os.environ.get("PDCTL_SCHEMATHESIS_S", "20"))
pytestmark = [pytest.mark.clients, pytest.mark.timeout(SECONDS + 240)]
# Not that what the document allows is taken: JSON Schema cannot say which fields exclude each other.
LEFT_OUT = "positive_data_acceptance"


@pytest.fixture(scope="module", params=[PD, COLOCATED], ids=["pd", "colocated"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[Running]:
    """With a short context: answers are as long as that where a request sets no limit."""
    folder = tmp_path_factory.mktemp("schemathesis")
    with running(folder, request.param, model=tiny_model_dir, max_len=256) as stack:
        yield stack


def test_nothing_gives_a_5xx(stack: Running, tmp_path: Path) -> None:
    url = stack.url
    before = {name: worker["instance"] for name, worker in workers(stack, url).items()}
    # Without the phase "coverage": there schemathesis trips over its own generators.
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url,
               "--phases", "examples,fuzzing,stateful", "--exclude-checks", LEFT_OUT, "--max-examples", "1000000",
               "--max-time", str(SECONDS), "--request-timeout", "60", "--workers", "4", "--continue-on-failure",
               "--no-color"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 180, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    assert httpx.get(f"{url}/health").status_code == 200
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True}, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 4
    eventually(lambda: is_idle(stack, url), 30, "nothing in flight, no block held")
    assert {name: worker["instance"] for name, worker in workers(stack, url).items()} == before, "none was restarted"


def workers(stack: Running, url: str) -> dict[str, dict[str, object]]:
    return {worker["name"]: worker for worker in stack.admin("/admin/state", url=url)["workers"]}


def is_idle(stack: Running, url: str) -> bool:
    state = stack.admin("/admin/state", url=url)
    loads = [worker["load"] for worker in state["workers"]]
    assert not any(load["integrity"] for load in loads), loads
    held = [load[key] for load in loads for key in ("waiting", "running", "expected", "receiving", "pushing",
                                                     "blocks_granted")]  # fmt: skip
    return not state["router"]["waiting"] and not state["router"]["running"] and not any(held)
