"""The real OpenAI client, sync and async, streamed and not."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.router.conftest import HELLO, Cluster, Start

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster(start: Start) -> Cluster:
    return await start(prefill=1, decode=1)


async def with_sync(cluster: Cluster, use: Callable[[openai.OpenAI], None]) -> None:
    """The server runs in this loop, so the blocking client runs in a thread."""

    def run() -> None:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
            use(client)

    await asyncio.to_thread(run)


async def test_sync_chat(cluster: Cluster) -> None:
    def use(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
        whole = client.chat.completions.create(model="smollm2-135m", messages=USER)
        assert whole.choices[0].message.content == HELLO
        stream = client.chat.completions.create(model="smollm2-135m", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == HELLO

    await with_sync(cluster, use)


async def test_sync_stream_helper(cluster: Cluster) -> None:
    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model="smollm2-135m", messages=USER, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[0].message.content == HELLO
        assert final.choices[0].finish_reason == "stop"
        assert final.usage is not None
        assert final.usage.completion_tokens > 1

    await with_sync(cluster, use)


async def test_sync_completions(cluster: Cluster) -> None:
    def use(client: openai.OpenAI) -> None:
        whole = client.completions.create(model="smollm2-135m", prompt=["a", "b"], max_tokens=50, logprobs=2)
        assert [choice.text for choice in whole.choices] == [HELLO, HELLO]
        stream = client.completions.create(model="smollm2-135m", prompt="a", max_tokens=50, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == HELLO

    await with_sync(cluster, use)


async def test_sync_errors(cluster: Cluster) -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="smollm2-135m", messages=USER, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="no-such", messages=USER)
        assert missing.value.code == "model_not_found"

    await with_sync(cluster, use)


async def test_async_chat(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        whole = await client.chat.completions.create(model="smollm2-135m", messages=USER, n=2)
        assert [choice.message.content for choice in whole.choices] == [HELLO, HELLO]
        stream = await client.chat.completions.create(model="smollm2-135m", messages=USER, stream=True, n=2)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [HELLO, HELLO]


async def test_async_error_in_stream(cluster: Cluster) -> None:
    cluster.decode.error = "lost its mind"
    cluster.decode.token0_to_router = False
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="lost its mind"):  # as a status or as an event, whoever is first
            async for _ in await client.chat.completions.create(model="smollm2-135m", messages=USER, stream=True):
                pass
