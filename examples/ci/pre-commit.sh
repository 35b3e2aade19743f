#!/usr/bin/env bash
# Audits each file named; the answer in words of those that fail, and the code of the last failure. Gates: certvit.toml.
set -uo pipefail
code=0
for checkpoint in "$@"; do
    answer=$(certvit audit "$checkpoint" --quiet 2>&1)
    status=$?
    if [ "$status" -ne 0 ]; then
        printf '%s\n%s\n' "$checkpoint" "$answer"
        code=$status
    fi
done
exit "$code"
