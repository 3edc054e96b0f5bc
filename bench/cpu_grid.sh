#!/usr/bin/env bash
# Two CPU cores, SmolLM2-135M: colocated, 1P1D where every prompt crosses, and hybrid routing, in interleaved rounds.
# On a machine that does nothing else; each part stands alone, the most important one first.
#
#     bench/cpu_grid.sh OUT_FOLDER [grid] [budgets] [long]        (a python with pdctl in it: PYTHON=.venv/bin/python)
#
#   grid      stage times (apart from the grid: `pdctl plan --check` grades cells that it was not fitted on), then
#             prompts of 128, 512, 1024 and 2048 tokens at 1, 4 and 8 at once, 64 tokens out
#   budgets   colocated at token budgets of 64 to 512 against both, at 8 at once: prompts of 512, and a mix of four of
#             128 to one of 1024. One budget is cheaply beaten; their frontier of requests/s and p99 gap is not. Ours have a
#             second point, too: hybrid64, where all but the shortest prompts cross unless prefill is backlogged
#   long      256 and 384 tokens out, where decode is what counts: colocated and hybrid, two rounds
#
# About 22, 12 and 5 minutes. Each part leaves PART.json, PART.html and PART.txt; the share of the requests on each path
# stands in "paths" of a cell. The JSON is written anew after each round of each mode, so that a run which is cut short
# still counts: SIGTERM or Ctrl-C, and the stacks go down. At the end bench/bars.py holds all of it to what hybrid is for.
#
# ROUNDS=3 LIMIT=6s REQUESTS=12 are a cell's size; a rehearsal: ROUNDS=1 LIMIT=1s REQUESTS=2 bench/cpu_grid.sh /tmp/x
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(grid budgets long)
mkdir -p "$out"
pdctl=("${PYTHON:-python}" -P -m pdctl)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# The same two workers as `demo`; prompts under 256 tokens, the default of a profile that does not say, stay on one.
hybrid=hybrid=demo+hybrid.threshold_tokens=${THRESHOLD:-256}
pd=pd=demo
slo=(--ttft 2s --tpot 80ms)

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
measure() { # PART ARGUMENTS...
  local part=$out/$1
  shift
  "${pdctl[@]}" bench "${slo[@]}" --rounds "${ROUNDS:-3}" "$@" -o "$part.json" > /dev/null 2> >(tee "$part.log" >&2) &
  child=$!
  while kill -0 "$child" 2> /dev/null; do wait "$child"; done
  [ -s "$part.json" ] && report "$part" > "$part.txt"
  [ -z "$is_cut" ] || exit 143
}

for part in "${parts[@]}"; do
  case $part in
    grid)
      measure grid --calibrate --mode colocated --mode $pd --mode "$hybrid" --limit "${LIMIT:-6s}" \
        --requests "${REQUESTS:-12}" --prompt 128 --prompt 512 --prompt 1024 --prompt 2048 -c 1 -c 4 -c 8
      "${pdctl[@]}" plan --check "$out/grid.json" | tee "$out/check.txt"
      "${pdctl[@]}" plan --check "$out/grid.json" --json > "$out/check.json"
      ;;
    budgets)
      measure budgets --mode colocated --sweep-budget 64 --sweep-budget 128 --sweep-budget 256 --sweep-budget 512 \
        --mode $pd --mode "$hybrid" --mode hybrid64=demo+hybrid.threshold_tokens=64 \
        --requests "$((2 * ${REQUESTS:-12}))" --prompt 512 --mix 128,128,128,128,1024 -c 8
      ;;
    long)
      for tokens in 256 384; do
        ROUNDS=${ROUNDS:-2} measure long-$tokens --mode colocated --mode "$hybrid" --requests "${REQUESTS:-12}" \
          --prompt 128 -c 8 --output $tokens
      done
      ;;
    *) echo "no such part: $part" >&2; exit 2 ;;
  esac
done
"${PYTHON:-python}" -P bench/bars.py "$out" | tee "$out/bars.txt"
