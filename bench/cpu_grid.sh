#!/usr/bin/env bash
# Two CPU cores, SmolLM2-135M: colocated, 1P1D where every prompt crosses, and hybrid routing, in interleaved rounds.
# On a machine that does nothing else; each part stands alone, the most important one first.
#
#     bench/cpu_grid.sh OUT_FOLDER [grid] [budgets] [long]        (a python with pdctl in it: PYTHON=.venv/bin/python)
#
#   grid      stage times (apart from the grid: `pdctl plan --check` grades cells that it was not fitted on), then twelve
#             loads, 64 tokens out: prompts of 128, 512, 1024 and 2048 tokens at 1, 4 and 8 at once
#   budgets   colocated at token budgets of 64 to 512 against both, at 8 at once: prompts of 512, and a mix of four of
#             128 to one of 1024. One budget is cheaply beaten; their frontier of requests/s and p99 gap is not. Ours have
#             a second point, too: hybrid64, where all but the shortest prompts cross unless prefill is backlogged
#   long      256 and 384 tokens out, where decode is what counts: colocated and hybrid
#
# A CPU that does not multiply bfloat16 (no AVX512_BF16: float32, three to four times slower) gets prompts of 128, 256 and
# 512 at 1, 2, 4 and 8, and a mix with 512. Estimates, none measured whole: 25, 12 and 5 minutes; in float32 40, 20 and 10,
# so ROUNDS=2 or OUTPUT=32 there if time is short.
#
# Each part leaves PART.json, PART.html and PART.txt; the share of the requests on each path stands in "paths" of a cell.
# The JSON is written anew after each round of each mode, so that a run which is cut short still counts: SIGTERM or
# Ctrl-C, and the stacks go down. At the end bench/bars.py holds all of it to what hybrid is for.
#
# ROUNDS=3 MORE_ROUNDS=2 (of the last two parts) LIMIT=6s REQUESTS=12 are a cell's size, TTFT and TPOT the objectives of
# goodput; PROMPTS and USERS are the grid, LONG the long prompt of the mix. To rehearse: ROUNDS=1 MORE_ROUNDS=1 LIMIT=1s REQUESTS=2 bench/cpu_grid.sh /tmp/x
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(grid budgets long)
mkdir -p "$out"
pdctl=("${PYTHON:-python}" -P -m pdctl)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if grep -q -m1 -E 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
  prompts=(${PROMPTS:-128 512 1024 2048}) users=(${USERS:-1 4 8}) long=${LONG:-1024} ttft=2s tpot=80ms
else
  prompts=(${PROMPTS:-128 256 512}) users=(${USERS:-1 2 4 8}) long=${LONG:-512} ttft=4s tpot=200ms
fi
loads=()
for n in "${prompts[@]}"; do loads+=(--prompt "$n"); done
for n in "${users[@]}"; do loads+=(-c "$n"); done
slo=(--ttft "${TTFT:-$ttft}" --tpot "${TPOT:-$tpot}")
requests=${REQUESTS:-12}

# The same two workers as `demo`; prompts under 256 tokens, the default of a profile that does not say, stay on one.
hybrid=(--mode "hybrid=demo+hybrid.threshold_tokens=${THRESHOLD:-256}")
pd=(--mode pd=demo)

# What was measured before an interrupt is made a report, too.
report() {
  "${PYTHON:-python}" -P - "$1.json" "$1.html" <<'PYTHON'
import sys
from pathlib import Path
from pdctl.bench import compare, report, results
result = results.read(Path(sys.argv[1]), "bench")
Path(sys.argv[2]).write_text(report.html(result), encoding="utf-8")
print(compare.show(result), *compare.verdict(result), sep="\n")
PYTHON
}
child=
is_cut=
trap 'is_cut=1; kill -TERM "$child" 2> /dev/null' INT TERM
measure() { # PART ROUNDS ARGUMENTS...
  local part=$out/$1 rounds=$2
  shift 2
  "${pdctl[@]}" bench "${slo[@]}" --rounds "$rounds" "$@" -o "$part.json" > /dev/null 2> >(tee "$part.log" >&2) &
  child=$!
  while kill -0 "$child" 2> /dev/null; do wait "$child"; done
  [ -s "$part.json" ] && report "$part" > "$part.txt"
  [ -z "$is_cut" ] || exit 143
}

for part in "${parts[@]}"; do
  case $part in
    grid)
      measure grid "${ROUNDS:-3}" --calibrate --mode colocated "${pd[@]}" "${hybrid[@]}" --limit "${LIMIT:-6s}" \
        --requests "$requests" --output "${OUTPUT:-64}" "${loads[@]}"
      "${pdctl[@]}" plan --check "$out/grid.json" | tee "$out/check.txt"
      "${pdctl[@]}" plan --check "$out/grid.json" --json > "$out/check.json"
      ;;
    budgets)
      measure budgets "${MORE_ROUNDS:-2}" --mode colocated --sweep-budget 64 --sweep-budget 128 --sweep-budget 256 \
        --sweep-budget 512 "${pd[@]}" "${hybrid[@]}" --mode hybrid64=demo+hybrid.threshold_tokens=64 \
        --requests "$((requests * 4 / 3))" --prompt 512 --mix "128,128,128,128,$long" -c 8
      ;;
    long)
      for tokens in 256 384; do
        measure "long-$tokens" "${MORE_ROUNDS:-2}" --mode colocated "${hybrid[@]}" --requests "$requests" --prompt 128 \
          -c 8 --output "$tokens"
      done
      ;;
    *) echo "no such part: $part" >&2; exit 2 ;;
  esac
done
"${PYTHON:-python}" -P bench/bars.py "$out" | tee "$out/bars.txt"
