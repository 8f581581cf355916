#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, then run the whole test suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup.sh

# The page in examples/timeline is tested in a real browser; without one, that is
# skipped.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null &&
    [ "$(id -u)" = 0 ]; then
    echo "[test] installing chromium" >&2
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends chromium; } >/dev/null || true
fi

export PYTHONPATH=. TOKENIZERS_PARALLELISM=false
# vLLM keeps compiled graphs and model facts by the hash of one file; a fresh folder
# keeps an earlier version's out.
VLLM_CACHE_ROOT=$(mktemp -d)
export VLLM_CACHE_ROOT
trap 'rm -rf "$VLLM_CACHE_ROOT"' EXIT

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Engines and servers spend most of their start on one core: two files at a time.
.venv/bin/python -m pytest --numprocesses 2 --dist loadfile "$@"
