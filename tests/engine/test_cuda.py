"""On a CUDA device: every way a step can run gives the logits of transformers' eager attention there, bfloat16."""

import threading
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from server.device import on_host
from server.engine.attention import BatchMeta, row_order
from server.engine.block_pool import BlockPool
from server.engine.engine import Engine
from server.engine.host_pool import Copy
from server.engine.kv_cache import HostBlocks, KVCachePool, KVSpec
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.errors import StartError
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-128": LlamaConfig(**(SHAPE | {"head_dim": 128, "attention_bias": True})),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=100),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=False),
    "qwen3": Qwen3Config(**SHAPE, use_sliding_window=False),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),  # through AttentionInterface
}
LENGTHS = [1500, 260, 60, 40, 30]


@pytest.fixture(scope="module", params=CONFIGS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    runner = ModelRunner(folder, device="cuda", kv_bytes=2**28, max_running=16)
    stages: list[str] = []
    runner.load(lambda stage, share: stages.append(stage))
    assert ("graphs: decode of 1" in stages) == (request.param != "mixtral")
    assert set(runner.logit_differences) == {"in one forward", "in chunks", "with a decode step"}
    return runner


def sequences(runner: ModelRunner) -> list[Sequence]:
    """Known to their end: each step's tokens are forced. Blocks in no order."""
    generator = torch.Generator().manual_seed(7)
    ids = (torch.randperm(runner.pool.num_blocks - 1, generator=generator) + 1).tolist()
    made = []
    for i, length in enumerate(LENGTHS):
        prompt = torch.randint(0, 1000, (length,), generator=generator).tolist()
        table = [ids.pop() for _ in range(runner.spec.num_blocks_for(length))]
        made.append(Sequence(SeqId("t", i, 0), prompt, SamplingParams(1), block_table=table))
    return made


def eager(runner: ModelRunner, seq: Sequence) -> torch.Tensor:
    model = runner._model
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(torch.tensor([seq.prompt], device="cuda"), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(implementation)


def steps(seqs: list[Sequence]) -> list[list[Slice]]:
    """The long prompt alone, launch by launch; the others packed; then mixed steps, then decodes of 5, 4 and 1 rows."""
    one, two, three, four, five = seqs
    plan = [
        [(one, 1300)],
        [(two, 200), (three, 10), (four, 11)],
        [(one, 100), (two, 1), (three, 7), (four, 1), (five, 3)],
    ]
    plan += [[(one, 1), (two, 1), (three, 1), (four, 1), (five, 1)]] * 8  # over the ends of blocks
    plan += [[(one, 1), (two, 1), (three, 1), (five, 1)], [(five, 1)], [(two, 1)], [(one, 33), (three, 5)]]
    result = []
    for step in plan:
        result.append([Slice(seq, seq.num_computed, count) for seq, count in step])
        for seq, count in step:
            seq.num_computed += count
    return result


@torch.inference_mode()
def test_logits_of_every_kind_of_step(runner: ModelRunner) -> None:
    seqs = sequences(runner)
    reference = {seq.id: eager(runner, seq) for seq in seqs}
    for step in steps(seqs):
        ordered = [step[i] for i in row_order(step)]
        meta = BatchMeta.build(ordered, runner.spec.block_size)
        logits = runner._forward.logits(meta, list(range(len(meta.token_ids))))
        assert logits is not None
        expected = torch.cat([reference[s.seq.id][s.start : s.start + s.num_tokens] for s in ordered])
        scale = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
        # The median over tokens: rounding sends a few tokens of a mixture of experts to another expert.
        difference = float(((logits.float() - expected).norm(dim=-1) / scale).median())
        print([s.num_tokens for s in ordered], f"{difference:.4f}")
        assert difference < 0.08
    assert not bool(runner.pool.data.isnan().any())


@torch.inference_mode()
def test_only_the_last_logits_of_some_rows(runner: ModelRunner) -> None:
    seqs = sequences(runner)
    whole = runner._forward.logits(BatchMeta.build([Slice(seqs[1], 0, 100)], 16), list(range(100)))
    assert whole is not None
    whole = whole.clone()
    some = runner._forward.logits(BatchMeta.build([Slice(seqs[1], 0, 100)], 16), [3, 99])
    torch.testing.assert_close(some, whole[[3, 99]], rtol=0.05, atol=0.05)
    assert runner._forward.logits(BatchMeta.build([Slice(seqs[1], 0, 100)], 16), []) is None


def test_sampled_tokens_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    """Greedy decode of one sequence in batches of 1 and of 5 that share graphs and padding."""
    seqs = sequences(runner)
    for seq in seqs:
        runner.execute(Batch([Slice(seq, 0, len(seq.prompt) - 1)]))
    together = runner.execute(Batch([Slice(seq, len(seq.prompt) - 1, 1) for seq in seqs]))
    assert all(token is not None and 0 <= token.id < 1000 for token in together)


def test_a_step_goes_on_from_tokens_that_are_still_on_the_device(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Each step waited for before the next is launched. 2. Each launched before: the same tokens."""
    outputs = []
    for is_async in (False, True):
        monkeypatch.setattr(ModelRunner, "is_async", is_async)
        seqs = sequences(runner)[1:]
        for i, seq in enumerate(seqs):
            seq.block_table = []
            seq.params = SamplingParams(24 + i, seed=i, temperature=0.8 * (i % 2))
        engine = Engine(
            Scheduler(Limits(), BlockPool(runner.pool.num_blocks, runner.spec.block_size), time.monotonic), runner
        )
        num_ahead = 0
        for seq in seqs:
            engine.scheduler.add(seq)
        while (result := engine.step()) is not None:
            assert result.error is None
            num_ahead += any(seq.num_coming for seq in seqs)
        assert (num_ahead > 20) == is_async
        outputs.append([seq.output for seq in seqs])
    assert outputs[0] == outputs[1]


def test_float32_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(StartError, match="float32"):
        ModelRunner(runner.folder, device="cuda", dtype="float32")


def test_blocks_go_to_pinned_host_memory_and_come_back() -> None:
    pool = KVCachePool(KVSpec(3, 2, 64, torch.bfloat16, 16), 9, "cuda")
    host = HostBlocks(pool, 4)
    assert host.block_s > 0 and not pool.blocks.any()
    pool.data.normal_()
    torch.cuda.synchronize()
    before = pool.blocks.clone()
    # 1. A step is under way on the engine's stream all the while: copies neither wait for it nor mix with it.
    torch.cuda._sleep(10_000_000)
    host.copy([Copy(block, block - 1, is_out=True) for block in (1, 2, 3, 4)])
    # 2. A host block that is read and used again in one go: the order of the list is kept.
    host.copy([Copy(5, 0, is_out=False), Copy(6, 0, is_out=True), Copy(7, 0, is_out=False), Copy(8, 3, is_out=False)])
    assert torch.equal(pool.blocks[[5, 7, 8]], before[[1, 6, 4]])


def test_a_step_has_written_its_blocks_when_it_returns(runner: ModelRunner) -> None:
    """The transfer reads the pool on another stream: a prompt's chunk is pushed as soon as `execute` is back, whether
    it sampled or not, and a block that was freed after a step may be granted at once."""
    whole = sequences(runner)[0]
    for start, stop in ((0, 700), (700, 1100), (1100, len(whole.prompt))):
        runner.execute(Batch([Slice(whole, start, stop - start)]))
        assert torch.cuda.current_stream().query()


def test_padding_of_a_graph_writes_the_null_block_alone(runner: ModelRunner) -> None:
    """Three rows in the graph of four, one row in that of one: nobody else's blocks change."""
    seqs = sequences(runner)
    runner.pool.blocks.zero_()  # other tests have written the same tokens to the same blocks
    for seq in seqs:
        runner.execute(Batch([Slice(seq, 0, len(seq.prompt) - 1)]))
    for rows in (seqs[:3], seqs[3:4]):
        before = runner.pool.blocks.clone()
        runner.execute(Batch([Slice(seq, len(seq.prompt) - 1, 1) for seq in rows]))
        changed = (runner.pool.blocks != before).any(1).nonzero().flatten().tolist()
        assert set(changed) - {0} == {seq.block_table[(len(seq.prompt) - 1) // 16] for seq in rows}


def test_reading_a_result_keeps_no_other_thread_from_the_device() -> None:
    """1. One thread waits for the result of two seconds of work. 2. Another's kernel, on a stream of its own, is done
    long before. (With a copy to ordinary memory it is launched only when the first thread has its result.)"""
    torch.zeros(8, device="cuda").add_(1)
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), []
    slow = torch.zeros(8, device="cuda")
    torch.cuda._sleep(4_000_000_000)
    slow.add_(1)
    waiting = threading.Thread(target=lambda: done.append(on_host(slow).tolist()))
    waiting.start()
    with torch.cuda.stream(side):
        for _ in range(20):
            torch.ones(8, device="cuda").add_(1)
            side.synchronize()
    assert done == []
    waiting.join(30)
    assert done == [[1.0] * 8]
