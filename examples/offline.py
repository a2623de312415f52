"""SPD without a server: `python examples/offline.py [MODEL] [STAGES]`. MODEL defaults to SmolLM2, STAGES to 2."""

from __future__ import annotations

import sys
import time

from smollm2 import prepare
from vllm import LLM, SamplingParams

QUESTIONS = ("Why is the sky blue?", "Count from one to twenty in words.", "Write a short poem about a pipeline.")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(prepare())
    stages = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    llm = LLM(
        model,
        pipeline_parallel_size=stages,
        speculative_config={"method": "spd", "drafter": "ngram"},
        max_model_len=2048,
        kv_cache_memory_bytes=512 * 2**20,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=128)
    for question in QUESTIONS:
        begin = time.perf_counter()
        output = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0].outputs[0]
        speed = len(output.token_ids) / (time.perf_counter() - begin)
        print(f"\n{question}\n{output.text}\n[{len(output.token_ids)} tokens, {speed:.1f} tok/s]")


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
