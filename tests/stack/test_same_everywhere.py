"""What a client sees does not depend on where its tokens were made: random requests, all fields drawn, on all paths
(pd, resident, colocated), streamed or whole, alone or beside others. Float32: same text, finish_reason, usage; logprobs
within 1e-3."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.stack.exchange import Exchange, Result, ask, gathered, same, whole
from tests.stack.harness import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ["one", "zwei", "日本", "😀", " ", "\n", "a b", "é", "x" * 30, "The quick brown fox"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "日"]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
BOUNDS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-z]{3,40}"}},
    {"structured_outputs": {"choice": ["left", "right"]}},
    {"response_format": {"type": "json_object"}},
]


LONG = 200  # characters that are some blocks of tokens in any case


def draw(rng: random.Random, least: int = 0) -> tuple[str, dict[str, Any]]:
    """A request with about half of its fields set; its prompts have at least so many characters, or tokens."""
    fields: dict[str, Any] = {"seed": rng.randrange(2**40), "max_tokens": rng.choice([1, 2, 3, 10, 40])}

    def maybe(share: float, **more: Any) -> None:
        if rng.random() < share:
            fields.update(more)

    maybe(0.5, temperature=rng.choice([0, 0.3, 0.8, 1.5]))
    maybe(0.3, top_p=rng.choice([0.2, 0.7, 0.95]))
    maybe(0.3, top_k=rng.choice([1, 5, 40]))
    maybe(0.2, min_p=rng.choice([0.01, 0.1]))
    maybe(0.3, presence_penalty=rng.uniform(-2, 2))
    maybe(0.3, frequency_penalty=rng.uniform(-2, 2))
    maybe(0.3, repetition_penalty=rng.uniform(0.7, 1.6))
    maybe(0.3, stop=rng.sample(["a", "bc", "e ", "日", "zq"], rng.randint(1, 3)))
    maybe(0.1, include_stop_str_in_output=True)
    maybe(0.1, stop_token_ids=rng.sample(range(512), 30))
    maybe(0.2, min_tokens=rng.randint(0, fields["max_tokens"]))
    maybe(0.2, ignore_eos=True)
    maybe(0.2, logit_bias={str(rng.randrange(512)): rng.choice([-100, -5, 5, 100]) for _ in range(5)})
    maybe(0.1, allowed_token_ids=rng.sample(range(512), 60))
    maybe(0.2, bad_words=["a", "th", " b"])
    maybe(0.2, n=rng.randint(2, 3))
    maybe(0.1, skip_special_tokens=False)
    maybe(0.3, return_token_ids=True)
    maybe(0.2, **rng.choice(BOUNDS))
    if rng.random() < 0.5:
        maybe(0.5, logprobs=True, top_logprobs=rng.choice([0, 3]))
        fields["messages"] = [{"role": "user", "content": words(rng, least)}]
        return CHAT, fields
    maybe(0.5, logprobs=rng.choice([0, 3]))
    maybe(0.2, echo=True)
    length = max(least, rng.choice([1, 15, 16, 17, 64, 100, 257, 600]))
    text = words(rng, least)
    second = "two" if not least else words(rng, least)
    fields["prompt"] = rng.choice([text, [text, second], [rng.randrange(3, 512) for _ in range(length)]])
    return COMPLETIONS, fields


def words(rng: random.Random, least: int) -> str:
    text = "".join(rng.choices(WORDS, k=rng.randint(1, 30)))
    while len(text) < least:
        text += rng.choice(WORDS)
    return text


@dataclass
class Seen:
    results: list[Result]
    usage: dict[str, int]  # without what was cached
    path: str  # of the first choice


def send(url: str, path: str, fields: dict[str, Any], *, stream: bool) -> Seen:
    fields = {**fields, "stream_options": {"include_usage": True}} if stream else fields
    exchange: Exchange = ask(url, path, fields, stream=stream, timing=True)
    assert exchange.status == 200, (fields, exchange.raw)
    last = exchange.chunks[-1] if stream else exchange.body
    results = gathered(exchange.chunks[:-1]) if stream else whole(exchange.body)
    usage = {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return Seen(results, usage, last["pdctl"]["path"])


def compare(pd_url: str, colocated_url: str, count: int, seed: int, least: int = 0) -> None:
    """Every request on the pd and the colocated path; with `least`, on the resident one too."""
    rng = random.Random(seed)
    requests = [(*draw(rng, least), rng.random() < 0.5) for _ in range(count)]

    def on_all(number: int) -> None:
        path, fields, stream = requests[number]
        fields["cache_salt"] = f"{seed}/{least}/{number}"  # nobody has read its prompt yet
        pd = send(pd_url, path, fields, stream=stream)
        assert pd.path == "pd"
        others = [send(colocated_url, path, fields, stream=not stream)]
        assert others[0].path == "colocated"
        if least and not ("prompt" in fields and "echo" in fields and "logprobs" in fields):  # those are read anew
            prompt = {key: fields[key] for key in ("prompt", "messages", "cache_salt") if key in fields}
            # An answer that ended with its first token has left nothing at the decode worker.
            send(pd_url, path, {**prompt, "max_tokens": 3, "ignore_eos": True}, stream=False)

            def again() -> Seen | None:
                """What workers publish is a moment late."""
                others.append(send(pd_url, path, fields, stream=not stream))
                return others[-1] if others[-1].path == "resident" else None

            eventually(again, 20, "a request on the resident path")
        for other in others:
            assert other.usage == pd.usage, fields
            assert same(pd.results, other.results), (path, fields, pd, other)

    with ThreadPoolExecutor(6) as clients:
        list(clients.map(on_all, range(count)))


def test_forty_requests(pd_url: str, colocated_url: str) -> None:
    compare(pd_url, colocated_url, 40, seed=1)


def test_twenty_requests_on_three_paths(pd_url: str, colocated_url: str) -> None:
    compare(pd_url, colocated_url, 20, seed=2, least=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least", [0, LONG])
def test_two_hundred_requests(pd_url: str, colocated_url: str, seed: int, least: int) -> None:
    compare(pd_url, colocated_url, 200, seed=100 + seed, least=least)
