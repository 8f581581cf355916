#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, then serve the demo checkpoint and transcribe its samples.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
exec .venv/bin/python examples/demo/transcribe_samples.py "$@"
