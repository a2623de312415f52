#!/bin/sh
# A head for SmolLM2-135M-Instruct from nothing: the model writes the text, the head trains on it. A few hours on two cores;
# interrupt it and run it again as you like. Another model: MODEL=…, STAGES=…
set -eu

MODEL=${MODEL:-$(python "$(dirname "$0")/smollm2.py")}
STAGES=${STAGES:-18,12}
ANCHORS=${ANCHORS:-0,18,24,30}
OUT=${OUT:-my-head}

vllm-spd synth --target "$MODEL" --out "$OUT/data.jsonl" --count "${COUNT:-4000}"
vllm-spd train --target "$MODEL" --stages "$STAGES" --anchors "$ANCHORS" \
    --data "$OUT/data.jsonl" --cache "$OUT/cache" --out "$OUT" \
    --lr 5e-4 --projection-lr 1e-3 --epochs "${EPOCHS:-6}"
vllm-spd eval-head "$OUT" --target "$MODEL" --data "$OUT/data.jsonl"
