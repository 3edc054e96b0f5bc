"""Cost of one schedule() + update() with 256 sequences that decode and the prefix cache on"""

import statistics
import time

from server.engine.block_pool import BlockPool
from server.engine.scheduler import Limits, Scheduler
from server.sequence import SamplingParams, SeqId, Sequence, Token


def main(num_seqs: int = 256, num_steps: int = 600, prompt_tokens: int = 512) -> None:
    num_blocks = num_seqs * (prompt_tokens + num_steps + 32) // 16 + 1
    limits = Limits(token_budget=8192, chunk_tokens=8192, max_seqs=num_seqs, max_running=num_seqs, age_limit_s=1e9)
    scheduler = Scheduler(limits, BlockPool(num_blocks, 16), time.monotonic)
    for n in range(num_seqs):
        prompt = [n * 7 + i for i in range(prompt_tokens)]
        scheduler.add(Sequence(SeqId("bench", n, 0), prompt, SamplingParams(max_tokens=num_steps + 64)))
    token = Token(5)
    seconds: list[float] = []
    while len(seconds) < num_steps:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        tokens: list[Token | None] = [token if piece.samples else None for piece in batch.slices]
        sampled = time.perf_counter()
        scheduler.update(batch, tokens)
        if len(batch.slices) == batch.num_tokens == num_seqs:
            seconds.append(time.perf_counter() - sampled + scheduled - start)
    seconds.sort()
    median, p99 = statistics.median(seconds), seconds[len(seconds) * 99 // 100]
    print(f"{num_seqs} running: median {median * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms over {num_steps} steps")


if __name__ == "__main__":
    main()
