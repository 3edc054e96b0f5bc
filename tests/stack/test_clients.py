"""Clients that people have, against live stacks. `make test-clients` installs them; one that is missing is skipped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.stack.harness import ROOT

# Foreign code warns about itself as it likes.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


class Trip(BaseModel):
    """A trip to book. Nothing else is allowed in it, so that a random model comes to its end."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=9)


def test_langchain(url: str) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(base_url=f"{url}/v1", api_key="x", model="m", max_tokens=300, max_retries=0)
    assert model.invoke("hi", max_tokens=5).usage_metadata["output_tokens"] <= 5
    chunks = list(model.stream("hi", max_tokens=8))
    assert len(chunks) > 1
    assert isinstance(model.with_structured_output(Trip, method="json_schema").invoke("book"), Trip)
    assert isinstance(model.with_structured_output(Trip, method="function_calling").invoke("book"), Trip)
    answer = model.bind_tools([Trip], tool_choice="any", parallel_tool_calls=False).invoke("book")
    (call,) = answer.tool_calls
    from langchain_core.messages import HumanMessage, ToolMessage

    again = model.invoke([HumanMessage("book"), answer, ToolMessage("done", tool_call_id=call["id"])], max_tokens=5)
    assert again.response_metadata["finish_reason"] in ("stop", "length")


def test_pydantic_ai(url: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="x")
    settings: Any = {"max_tokens": 300}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("m", provider=provider)
        for output in (Trip, NativeOutput(Trip)):
            result = Agent(model, output_type=output, model_settings=settings).run_sync("book")
            assert isinstance(result.output, Trip)


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    ask: dict[str, Any] = {"model": "hosted_vllm/m", "api_base": f"{url}/v1", "api_key": "x", "max_tokens": 8}
    messages = [{"role": "user", "content": "hi"}]
    whole = litellm.completion(messages=messages, temperature=0, **ask)
    assert whole.usage.completion_tokens <= 8
    parts = litellm.completion(messages=messages, temperature=0, stream=True, **ask)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == (whole.choices[0].message.content or "")


def test_llm(url: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    entry = {"model_id": "m", "model_name": "m", "api_base": f"{url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    env = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "x"}
    for more in ((), ("--no-stream",)):
        command = [sys.executable, "-m", "llm", "-m", "m", "hi", "-o", "max_tokens", "8", "-n", *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_llm_comply(url: str) -> None:
    """Its chat set, but for images, which a text model refuses, and a request without a model, which is served."""
    pytest.importorskip("llm_comply")
    tool = Path(sys.executable).parent / "llm-comply"
    common = [str(tool), "run", "-u", f"{url}/v1", "-m", "m", "-k", "x", "--format", "openai-chat", "--json"]
    done = subprocess.run(common, capture_output=True, text=True, timeout=280, check=False)
    refused = {"Image Input", "Error Handling"}
    a_random_model_talks_on = {f"finish_reason: expected '{end}', got 'length'" for end in ("stop", "tool_calls")}
    for row in json.loads(done.stdout)["results"]:
        errors = set(row.get("errors", ())) - a_random_model_talks_on
        assert row["status"] in ("passed", "skipped") or row["name"] in refused or not errors, row


@pytest.fixture(scope="session")
def openai_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK's last line but one; the tests of tests/stack/test_openai_live.py run with whichever is found first."""
    folder = tmp_path_factory.mktemp("openai-2")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "openai>=2,<3"]
    install = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if install.returncode:
        pytest.skip(f"pip cannot install openai 2: {install.stderr[-300:]}")
    assert list(folder.glob("openai-2.*.dist-info"))
    return folder


def test_openai_2(url: str, openai_2: Path) -> None:
    """`parse`, the `stream` helpers, tools, responses: all that the tests of the present line use."""
    path = os.pathsep.join((str(openai_2), str(ROOT)))
    env = os.environ | {"PYTHONPATH": path, "PDCTL_TEST_URL": url}
    found = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    assert subprocess.run(found, env=env, capture_output=True, text=True, check=True).stdout.startswith("2.")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/stack/test_openai_live.py", "-k",
               "pd"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const whole = await client.chat.completions.create({ model: "m", messages, max_tokens: 9, temperature: 0 });
const runner = client.chat.completions.stream({ model: "m", messages, max_tokens: 9, temperature: 0 });
let text = "";
runner.on("content", (delta) => (text += delta));
const final = await runner.finalChatCompletion();
if (final.choices[0].message.content !== whole.choices[0].message.content) throw new Error("stream differs");
if (text !== whole.choices[0].message.content) throw new Error("deltas differ");
const parameters = { type: "object", properties: { a: { enum: ["x"] } }, required: ["a"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "f", parameters } }];
const calls = client.chat.completions.stream({ model: "m", messages, tools, tool_choice: "required",
  parallel_tool_calls: false, max_tokens: 200 });
const called = await calls.finalChatCompletion();
if (JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).a !== "x") throw new Error("no call");
const response = client.responses.stream({ model: "m", input: "hi", max_output_tokens: 5 });
for await (const event of response) { if (event.type === "error") throw new Error(event.message); }
await response.finalResponse();
const bad = await client.chat.completions.create({ model: "m", messages, temperature: -1 }).catch((error) => error);
if (bad.status !== 400 || bad.param !== "temperature") throw new Error("not refused");
console.log("fine");
"""


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("npm"):
        pytest.skip("no npm")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    install = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "openai"], cwd=folder, capture_output=True,
                             text=True, timeout=200, check=False)  # fmt: skip
    if install.returncode:
        pytest.skip(f"npm cannot install openai: {install.stderr[-300:]}")
    (folder / "use.mjs").write_text(NODE)
    return folder


def test_openai_node(url: str, node_folder: Path) -> None:
    done = subprocess.run(["node", "use.mjs"], cwd=node_folder, env=os.environ | {"URL": url}, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr
