#!/bin/sh
# Fuzzes a live stack by its own /openapi.json: sh tests/schemathesis.sh http://127.0.0.1:8000 [seconds]
# Nothing a client sends may give a 5xx or hang, and the stack must be well afterwards. Needs `pip install schemathesis`
# and a profile with a small max_len: answers are as long as that where a request sets no limit.
set -eu
url=$1
seconds=${2:-600}
# Without the phase "coverage": hypothesis trips over schemathesis' own lambdas there.
schemathesis run "$url/openapi.json" --url "$url" --checks not_a_server_error --phases fuzzing,stateful \
    --max-examples 100000 --max-time "$seconds" --request-timeout 60 --workers 4 --continue-on-failure
curl --fail --silent --show-error "$url/health"
echo "no 5xx, and the stack is well"
