"""Loading: what is refused and why, memory for the KV cache, fingerprints, progress; and what execute gives back."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine import loading
from server.engine.attention import BatchMeta, paged_attention_forward
from server.engine.attention_torch import TorchAttention
from server.engine.kv_cache import KVCachePool, KVSpec
from server.engine.model_runner import ModelRunner
from server.engine.pool_view import PoolView
from server.errors import ModelError, StartError
from server.sequence import Batch, Sequence, Slice
from tests.engine.models import (
    FAMILIES,
    Reference,
    load_runner,
    make_config,
    make_engine,
    make_sequence,
    random_prompt,
    save_model,
    serve,
)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), **FAMILIES["llama"])


def dummy_of(folder: Path, model_type: str, **changes: Any) -> str:
    make_config(model_type, **changes).save_pretrained(folder)
    return f"dummy:{folder}"


# -- load -------------------------------------------------------------------------------------------------------------


def test_progress_goes_up(llama_dir: Path) -> None:
    seen: list[tuple[str, float]] = []
    runner = ModelRunner(llama_dir, dtype="float32", kv_bytes=2**26)
    runner.load(lambda stage, share: seen.append((stage, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert seen[0][0] == "weights"
    assert seen[-1] == ("ready", 1.0)
    assert runner.logit_differences.keys() == {"in one forward", "in chunks", "with a decode step"}
    assert max(runner.logit_differences.values()) < 1e-5
    assert not runner.pool.blocks.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_check(llama_dir: Path, dtype: str) -> None:
    runner = load_runner(llama_dir, dtype=dtype)
    assert runner.pool.data.dtype == getattr(torch, dtype)


def test_auto_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    expectations = [({"avx2"}, torch.float32), ({"avx512_bf16"}, torch.bfloat16), ({"amx_bf16"}, torch.bfloat16)]
    for flags, expected in expectations:
        monkeypatch.setattr(loading, "_cpu_flags", lambda flags=flags: flags)
        assert loading.choose_dtype("auto", cpu) is expected
    assert loading.choose_dtype("float16", cpu) is torch.float16


def test_the_check_notices_a_window_off_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, **FAMILIES["mistral"])
    honest = PoolView.bias

    def one_more(self: PoolView, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return honest(self, query, key).masked_fill(key == query - 40, 0.0)

    monkeypatch.setattr(PoolView, "bias", one_more)
    with pytest.raises(ModelError, match="other logits .* relative difference"):
        load_runner(folder)


def test_the_check_notices_a_nan(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "run", lambda self, q, k, v, layer, scaling: q.transpose(1, 2) * float("nan"))
    with pytest.raises(ModelError, match="difference nan"):
        load_runner(llama_dir)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "softcap"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "s_aux"),
    ("bloom", {}, "other logits"),
    ("stablelm", {}, "does not pass keywords through"),
    ("diffllama", {}, "other logits"),
    ("gpt_neox", {}, "keys of 6 x 16 and values of 6 x 16, its config says 2 x 16"),
    ("gptj", {}, "does not run with paged attention"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused_when_tried_out(tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_runner(dummy_of(tmp_path, model_type, **changes), max_len=64)


OTHERS = ["gemma", "phi", "olmo2", "granite", "cohere", "starcoder2", "qwen2_moe", "exaone4", "seed_oss"]


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_families_pass_the_check(tmp_path: Path, model_type: str) -> None:
    """Scaled logits, biases, norms in other places: all of it is transformers' own code."""
    load_runner(dummy_of(tmp_path, model_type), max_len=64)


def test_foreign_errors_become_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        ModelRunner(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(ModelError, match="config in .* cannot be read"):
        ModelRunner(tmp_path)
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers cannot load the model in"):
        load_runner(tmp_path)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_kv_bytes_is_kept_to(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = load_runner(llama_dir, kv_bytes=10_000_000, max_len=1000)
    assert runner.pool.num_blocks == 10_000_000 // runner.spec.block_bytes
    assert runner.pool.blocks.numel() <= 10_000_000
    assert f"{runner.pool.num_blocks} blocks of 16 tokens" in caplog.text


def test_auto_takes_no_more_than_can_be_used(llama_dir: Path) -> None:
    runner = load_runner(llama_dir, kv_bytes="auto", max_len=100, max_running=3)
    assert runner.pool.num_blocks == 1 + 3 * 7


def test_a_pool_for_less_than_one_sequence_is_refused(llama_dir: Path) -> None:
    with pytest.raises(StartError, match="has 122 blocks, 1.0 MiB; one sequence of max_len 4096 needs 257, 2.0 MiB"):
        load_runner(llama_dir, kv_bytes=1_000_000)


def test_a_pool_above_memory_is_refused(llama_dir: Path) -> None:
    with pytest.raises(StartError, match="does not fit"):
        load_runner(llama_dir, kv_bytes=10**15)


def test_max_len_above_the_models_own_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"max_len \(5000\) is above the model's own limit of 4096"):
        ModelRunner(llama_dir, max_len=5000)
    assert ModelRunner(llama_dir).max_len == 4096


# -- fingerprint ------------------------------------------------------------------------------------------------------


def test_fingerprint_tells_weights_and_configs_apart(llama_dir: Path, tmp_path: Path) -> None:
    original = loading.fingerprint(llama_dir, random=False)
    copy = tmp_path / "copy"
    shutil.copytree(llama_dir, copy)
    assert loading.fingerprint(copy, random=False) == original

    other = save_model(tmp_path / "other", "llama", initializer_range=0.1)
    shutil.copy(llama_dir / "config.json", other)
    assert loading.fingerprint(other, random=False) != original

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 5.0}}))
    assert loading.fingerprint(copy, random=False) != original
    assert loading.fingerprint(llama_dir, random=True) != original


def test_dummy_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    path = dummy_of(tmp_path, "llama")
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first, second = load_runner(path, pack=False), load_runner(f"{path}/config.json", pack=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint() == second.fingerprint()
    for a, b in zip(first._model.parameters(), second._model.parameters(), strict=True):
        assert torch.equal(a, b)


# -- execute ----------------------------------------------------------------------------------------------------------


def test_execute_leaves_sequences_alone(llama_dir: Path) -> None:
    runner = load_runner(llama_dir)
    seq = make_sequence(0, random_prompt(20, seed=1))
    seq.block_table = [1, 2]
    tokens = runner.execute(Batch([Slice(seq, 0, 20)]))
    assert tokens[0] is not None
    assert (seq.output, seq.num_computed, seq.block_table) == ([], 0, [1, 2])
    assert runner.execute(Batch([Slice(seq, 0, 19)])) == [None]


def test_steps_launched_from_tokens_that_nobody_knows_yet(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that computes by itself: prompts in chunks, greedy ones and drawn ones, one that stops. 1. Each
    step waited for. 2. Each launched before the one before it is waited for: the same tokens, and the same draws."""
    lengths, kinds = [50, 5, 33, 17], [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.3, "top_k": 5}, {}]
    outputs = []
    for is_async in (False, True):
        monkeypatch.setattr(ModelRunner, "is_async", is_async)
        runner = load_runner(llama_dir)
        seqs = [
            make_sequence(i, random_prompt(n, seed=i), **({"max_tokens": 9 + i} | kind))
            for i, (n, kind) in enumerate(zip(lengths, kinds, strict=True))
        ]
        if outputs:
            seqs[0] = make_sequence(0, seqs[0].prompt, max_tokens=9, stop_token_ids=(outputs[0][0][4],))
        engine = make_engine(runner, chunk_tokens=24, token_budget=32)
        outputs.append(serve(engine, seqs))
    assert outputs[1][0] == outputs[0][0][: outputs[0][0].index(outputs[0][0][4]) + 1]
    assert outputs[1][1:] == outputs[0][1:]


@pytest.mark.parametrize("chunks", [(20,), (7, 1, 12)])
def test_prompt_logprobs(llama_dir: Path, chunks: tuple[int, ...]) -> None:
    """Among rows of others, and where every position of a step is read: each logprob is of its own position."""
    runner = load_runner(llama_dir)
    prompts = [random_prompt(20, seed=3), random_prompt(20, seed=4)]
    seqs = [make_sequence(i, prompt, num_prompt_logprobs=0) for i, prompt in enumerate(prompts)]
    seqs.append(make_sequence(2, [5]))
    for i, seq in enumerate(seqs):
        seq.block_table = [1 + 2 * i, 2 + 2 * i]
    start = 0
    for length in chunks:
        *tokens, plain = runner.execute(Batch([*(Slice(seq, start, length) for seq in seqs[:2]), Slice(seqs[2], 0, 1)]))
        assert plain is not None
        assert plain.prompt == ()
        start += length
    reference = Reference(llama_dir)
    for prompt, token in zip(prompts, tokens, strict=True):
        assert token is not None
        logprobs = reference.logprobs(prompt, len(prompt))
        assert token.id == int(logprobs[-1].argmax())
        assert [each.id for each in token.prompt] == prompt[1:]
        expected = [float(logprobs[i, following]) for i, following in enumerate(prompt[1:])]
        assert [each.logprob for each in token.prompt] == pytest.approx(expected, abs=1e-4)


def test_kv_moves_between_runners_as_blocks(llama_dir: Path) -> None:
    """What a transfer does: blocks of one pool, copied to other places of another, decode to the same token."""
    prefill, decode = load_runner(llama_dir), load_runner(llama_dir)
    seq = make_sequence(0, random_prompt(37, seed=2))
    seq.block_table = [1, 2, 3]
    first = prefill.execute(Batch([Slice(seq, 0, 37)]))[0]
    assert first is not None
    seq.output.append(first.id)
    expected = prefill.execute(Batch([Slice(seq, 37, 1)]))
    decode.pool.blocks[[9, 4, 7]] = prefill.pool.blocks[[1, 2, 3]]
    seq.block_table = [9, 4, 7]
    assert decode.execute(Batch([Slice(seq, 37, 1)])) == expected


# -- the door from transformers ---------------------------------------------------------------------------------------


class FakeAttention(torch.nn.Module):
    layer_idx = 0


def make_planned() -> Sequence:
    seq = make_sequence(0, [1, 2, 3])
    seq.block_table = [1]
    return seq


def call(**kwargs: Any) -> Any:
    pool = KVCachePool(KVSpec(1, 2, 4, torch.float32, 4, sliding_window=8), 3)
    q, kv = torch.zeros(1, 6, 3, 4), torch.zeros(1, 2, 3, 4)
    backend = TorchAttention(pool)
    backend.plan(BatchMeta.build([Slice(make_planned(), 0, 3)], 4))
    options = {"attention_mask": None, "paged": backend, "sliding_window": 8, **kwargs}
    return paged_attention_forward(FakeAttention(), q, kv, kv, **options)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"paged": None}, "does not pass keywords"),
        ({"attention_mask": torch.zeros(1)}, "mask of its own"),
        ({"sliding_window": None}, "window of None, its config says 8"),
        ({"is_causal": False}, "not causal"),
        ({"softcap": 30.0}, "'softcap'"),
        ({"s_aux": torch.zeros(2)}, "'s_aux'"),
        ({"position_bias": torch.zeros(2)}, "'position_bias'"),
    ],
)
def test_what_the_door_refuses(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        call(**kwargs)


def test_what_the_door_lets_through() -> None:
    out, weights = call(softcap=None, dropout=0.0, use_cache=False, position_ids=torch.zeros(1))
    assert out.shape == (1, 3, 6, 4)
    assert weights is None
