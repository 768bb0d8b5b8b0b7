#!/bin/sh
# What `make run` shows: a real model answers, then answers again on a prefix that is still warm.
set -eu
prefix="$(dirname "$0")/../docs/architecture.md"
model=smollm2-135m-instruct

"$MODELD" models import --demo
trap '"$MODELD" drain >/dev/null 2>&1 || true' EXIT

echo
echo "== a first prompt: the prefix (docs/architecture.md) is prefilled cold"
"$MODELD" run "$model" "In one sentence, what is a supervisor?" \
    --prefix-file "$prefix" --max-tokens 48 --stats
echo
echo "== a second prompt on the same prefix: only the new text is prefilled"
"$MODELD" run "$model" "In one sentence, what is a worker?" \
    --prefix-file "$prefix" --max-tokens 48 --stats
