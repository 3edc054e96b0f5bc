"""The simulator at scale: 1,000 workers, 1,000,000 requests of 1024 prompt and 64 output tokens, on one core.

The stage model is that of an 8B model on an H200; the rate keeps three quarters of the prefill pool busy.

    python bench/planner.py [--requests 1000000] [--max-minutes 20] [--max-gib 4]
"""

import argparse
import resource
import sys
import time

from pdctl.plan.loads import Lengths, poisson
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel

STEP = StepModel(floor_s=4.7e-3, prompt_token_s=2.4e-5, decode_seq_s=2e-5, context_token_s=2.8e-8)
STAGES = Stages(
    STEP, STEP, STEP, kv_token_bytes=131_072, link_bytes_s=100e9, link_latency_s=1e-4, router_s=3e-4, source="H200, 8B"
)
LENGTHS = Lengths(1024, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=24.0, help="requests/s a worker")
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--max-gib", type=float, default=0.0)
    asked = parser.parse_args()
    layout = Layout(prefill=asked.workers * 3 // 4, decode=asked.workers // 4)
    wall = time.monotonic()
    cluster = Cluster(layout, STAGES, Sizes(hop_s=1e-4), skip=asked.requests // 100)
    seen = cluster.run(poisson(asked.rate * asked.workers, asked.requests, LENGTHS))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    minutes, gib, clock = usage.ru_utime / 60, usage.ru_maxrss / 2**20, (time.monotonic() - wall) / 60
    print(
        f"{layout}, {asked.requests} requests: {minutes:.1f} min of one core ({clock:.1f} by the clock), "
        f"{gib:.2f} GiB\nTTFT {seen.ttft_mean * 1e3:.1f} ms, TPOT {seen.tpot_mean * 1e3:.2f} ms, "
        f"{seen.requests_s:.0f} requests/s, busy {', '.join(f'{k} {v:.0%}' for k, v in seen.utilisation.items())}"
    )
    return int(0 < asked.max_minutes < minutes or 0 < asked.max_gib < gib)


if __name__ == "__main__":
    sys.exit(main())
