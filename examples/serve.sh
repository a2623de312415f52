#!/usr/bin/env bash
# The OpenAI-compatible server with SPD: examples/serve.sh [MODEL] [STAGES], then python examples/client.py "a question".
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-$(.venv/bin/python examples/smollm2.py)}
stages=${2:-2}
exec .venv/bin/vllm serve "$model" \
    --pipeline-parallel-size "$stages" \
    --speculative-config '{"method": "spd", "drafter": "ngram"}' \
    --max-model-len 2048 --enforce-eager \
    --host 127.0.0.1 --port 8000
