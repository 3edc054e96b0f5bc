#!/usr/bin/env bash
# Two GPUs of one host, the same load in turn: two colocated workers (token budgets 8192 and 512), one prefill and one
# decode worker (every prompt crosses), the same with hybrid routing. One JSON line a cell, into the file given as $1.
#
#     bench/two_gpu.sh RESULTS.jsonl [MODE ...]      modes: colocated-8192 colocated-512 1p1d hybrid
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?a file for the results}
shift
modes=("$@")
[ ${#modes[@]} -gt 0 ] || modes=(colocated-8192 colocated-512 1p1d hybrid)
cells=${CELLS:-1x128,1x1024,1x4096,8x128,8x1024,8x4096,32x128,32x1024,32x4096,24xmix}
pair=(--set colocated.workers=2 --set 'colocated.gpus=[0,1]')

for mode in "${modes[@]}"; do
  case $mode in
    colocated-*) args=(bench/h200-colocated.toml "${pair[@]}" --set "colocated.token_budget=${mode#*-}"
      --set "colocated.chunk_tokens=${mode#*-}") ;;
    1p1d) args=(bench/h200-1p1d.toml) ;;
    hybrid) args=(bench/h200-1p1d.toml --set hybrid.threshold_tokens=256 --set hybrid.rest_s=1 --set slo.tpot_p95=0.0135) ;;
    *) echo "no such mode: $mode" >&2; exit 2 ;;
  esac
  python3 bench/closed_loop.py "${args[@]}" --label "$mode" --cells "$cells" --per-slot "${PER_SLOT:-3}" -o "$out" \
    ${MORE:-}
done
