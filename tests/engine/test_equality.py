"""What the engine says is what transformers' own generate says, token for token, however the tokens are batched."""

from pathlib import Path

import pytest
import torch

from server.engine.model_runner import ModelRunner
from server.sequence import Batch, Slice
from tests.engine.models import (
    FAMILIES,
    Reference,
    load_runner,
    make_engine,
    make_sequence,
    random_prompt,
    save_model,
    serve,
)

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 300]


class Model:
    """A runner, and the reference with its answers kept."""

    def __init__(self, folder: Path) -> None:
        self.runner = load_runner(folder)
        self.reference = Reference(folder)
        self._answers: dict[int, list[int]] = {}

    def answer(self, length: int) -> list[int]:
        if length not in self._answers:
            self._answers[length] = self.reference.generate(random_prompt(length, seed=3))
        return self._answers[length]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save_model(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save_model(tmp_path_factory.mktemp("llama"), **FAMILIES["llama"]))


def check(model: Model, lengths: list[int], **limits: int) -> None:
    seqs = [make_sequence(i, random_prompt(n, seed=3)) for i, n in enumerate(lengths)]
    outputs = serve(make_engine(model.runner, **limits), seqs)
    for length, output in zip(lengths, outputs, strict=True):
        assert output == model.answer(length), f"prompt of {length} tokens, {limits}"


@pytest.mark.parametrize("chunk_tokens", [16, 48, 256])
def test_alone(model: Model, chunk_tokens: int) -> None:
    for length in (1, 16, 17, 65, 129, 300):
        check(model, [length], chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [16, 100, 256])
def test_sixteen_at_once(model: Model, chunk_tokens: int) -> None:
    check(model, EDGES, chunk_tokens=chunk_tokens, token_budget=256)


def test_decode_between_chunks(model: Model) -> None:
    """A budget so small that prompts and decode tokens share nearly every step, and few prompts at a time."""
    check(model, [300, 1, 129, 64, 33, 200], token_budget=24, chunk_tokens=20, max_seqs=2, max_running=4)


@pytest.mark.parametrize("length", [1000, 3000])
def test_long_prompts(llama: Model, length: int) -> None:
    check(llama, [length], chunk_tokens=256)
    check(llama, [length, 17, 1, 500], chunk_tokens=200)


def test_very_different_contexts_decode_together(llama: Model) -> None:
    check(llama, [3000, 1, 5, 40, 1000, 16], chunk_tokens=256, token_budget=512)


def test_prefix_hits_change_nothing(llama: Model) -> None:
    engine = make_engine(llama.runner)
    first, again = make_sequence(0, random_prompt(129, seed=3)), make_sequence(1, random_prompt(129, seed=3))
    serve(engine, [first])
    serve(engine, [again])
    assert again.num_cached == 128
    assert again.output == first.output == llama.answer(129)


def test_preemption_by_recompute_changes_nothing(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.runner.pool, "num_blocks", 18)  # what make_engine gives the BlockPool
    engine = make_engine(llama.runner, max_len=200)
    seqs = [make_sequence(i, random_prompt(n, seed=3)) for i, n in enumerate([63, 64, 65, 33, 31])]
    outputs = serve(engine, seqs)
    assert outputs == [llama.answer(n) for n in (63, 64, 65, 33, 31)]
    assert engine.scheduler.counters().preemptions > 0  # type: ignore[attr-defined]


def test_slices_may_come_in_any_order(llama: Model) -> None:
    """The runner sorts rows for its backend; tokens come back in the order of the batch."""
    runner = llama.runner
    seqs = [make_sequence(i, random_prompt(n, seed=3)) for i, n in enumerate([40, 1, 129, 17])]
    first = 1
    for seq in seqs:
        blocks = runner.spec.num_blocks_for(len(seq.prompt))
        seq.block_table = list(range(first, first + blocks))
        first += blocks
    batch = Batch([Slice(seqs[0], 0, 40), Slice(seqs[1], 0, 1), Slice(seqs[2], 0, 100), Slice(seqs[3], 0, 17)])
    tokens = runner.execute(batch)
    assert [t.id if t else None for t in tokens] == [
        llama.answer(40)[0],
        llama.answer(1)[0],
        None,
        llama.answer(17)[0],
    ]


def test_null_block_stays_zero(llama: Model) -> None:
    assert not llama.runner.pool.blocks[0].any()


def test_unpacked_weights_say_the_same(tmp_path: Path, llama: Model) -> None:
    runner = load_runner(save_model(tmp_path, **FAMILIES["llama"]), pack=False)
    assert serve(make_engine(runner), [make_sequence(0, random_prompt(65, seed=3))]) == [llama.answer(65)]


class SmolLM2:
    """Eight prompts in the real vocabulary, short to a few blocks, with the reference's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Reference(folder)
        self.prompts = smollm2_prompts(folder)
        self.answers = [self.reference.generate(prompt) for prompt in self.prompts]

    def outputs(self, runner: ModelRunner) -> list[list[int]]:
        seqs = [make_sequence(i, prompt) for i, prompt in enumerate(self.prompts)]
        return serve(make_engine(runner, chunk_tokens=64), seqs)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> SmolLM2:
    return SmolLM2(smollm2_dir)


def smollm2_prompts(folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Once upon a time there was a small village by the sea, where",
        "Water boils at",
        "List three colours:",
        "The quick brown fox jumps over the lazy dog. " * 9,
        "In 1969 the first people walked on the Moon. They",
        "2, 4, 6, 8,",
    ]
    return [tokenizer.encode(text).ids for text in texts]


def test_smollm2_in_float32(smollm2: SmolLM2) -> None:
    assert smollm2.outputs(load_runner(smollm2.folder, max_len=512)) == smollm2.answers


@pytest.mark.usefixtures("multiplies_bfloat16")
def test_smollm2_in_bfloat16(smollm2: SmolLM2) -> None:
    """Equal up to the first place where the float32 reference itself is nearly undecided."""
    outputs = smollm2.outputs(load_runner(smollm2.folder, dtype="bfloat16", max_len=512))
    for prompt, output, expected in zip(smollm2.prompts, outputs, smollm2.answers, strict=True):
        if output == expected:
            continue
        place = next(i for i, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b)
        logprobs = smollm2.reference.logprobs(prompt + expected[:place], 1)[0]
        best, second = logprobs.topk(2).values.tolist()
        assert best - second < 0.25, (place, best - second)
        assert logprobs[expected[place]] - logprobs[output[place]] < 0.25


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk_tokens", [16, 17, 31, 64, 128, 255, 256])
def test_every_length(model: Model, chunk_tokens: int) -> None:
    for low in range(1, 300, 16):
        check(model, list(range(low, low + 16)), chunk_tokens=chunk_tokens, token_budget=300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_head_of_a_group_is_its_own(tmp_path: Path) -> None:
    """Block sizes and head shapes that are not powers of two."""
    for i, (heads, kv_heads, head_dim, block_size) in enumerate([(3, 1, 24, 16), (4, 4, 8, 3), (9, 3, 64, 64)]):
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": 72}
        folder = save_model(tmp_path / str(i), "llama", **shape)
        runner, reference = load_runner(folder, block_size=block_size), Reference(folder)
        prompts = [random_prompt(n, seed=5) for n in (1, 7, 64, 200)]
        seqs = [make_sequence(k, p) for k, p in enumerate(prompts)]
        assert serve(make_engine(runner, chunk_tokens=60), seqs) == [reference.generate(p) for p in prompts]


def test_forward_allocates_no_cache(llama: Model) -> None:
    """A guard against transformers making its DynamicCache beside our pool."""
    import unittest.mock

    with unittest.mock.patch("transformers.cache_utils.DynamicCache.__init__", side_effect=AssertionError):
        serve(make_engine(llama.runner), [make_sequence(0, random_prompt(20, seed=3))])
    assert torch.is_grad_enabled()
