#!/bin/sh
# Fuzzes a live stack by its own /openapi.json: sh tests/schemathesis.sh http://127.0.0.1:8000 [seconds]
# Nothing a client sends may give a 5xx or hang, and the stack must be well afterwards. Needs `pip install schemathesis`.
set -eu
url=$1
seconds=${2:-600}
# A stack that is busy may say 429; answers are cut short by max_len of its profile, so take one with a small one.
timeout "$seconds" schemathesis run "$url/openapi.json" --url "$url" --checks not_a_server_error --max-examples 100000 \
    --request-timeout 60 --workers 4 --continue-on-failure || status=$?
case "${status:-0}" in 0 | 124) ;; *) exit "$status" ;; esac
curl --fail --silent --show-error "$url/health"
echo "no 5xx, and the stack is well"
