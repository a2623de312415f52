"""`make demo`: one question, answered by SPD over two stages and by plain vLLM, and the difference in one line."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from server import Server, ServerError
from smollm2 import HEAD, prepare

STAGES = 2
QUESTION = "How does a pipeline in a processor work?"
MAX_TOKENS = 200
ROUNDS = 3  # the speed is the median of these
ENGINE = ("--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "512M")
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Answer:
    text: str
    speed: float  # tokens per second from the first token on


@dataclass(frozen=True)
class Run:
    text: str
    speed: float
    acceptance: float


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with Server` takes the server down
    say("Preparing SmolLM2-135M-Instruct (the first time it is converted from the pip package, half a minute).")
    model = prepare()
    say(f"Question: {QUESTION}\n")
    spd = run("SPD", model, "-pp", str(STAGES), "--speculative-config", json.dumps(speculative_config()))
    plain = run("plain vLLM", model)
    same = spd.text == plain.text
    say(summary(plain, spd, same))
    return 0 if same else 1


def speculative_config() -> dict[str, str]:
    return {"method": "spd", "model": str(HEAD)}


def run(title: str, model: Path, *flags: str) -> Run:
    stages = f"over {STAGES} stages" if "-pp" in flags else "in one stage"
    say(f"Starting `vllm serve` with {title} {stages}; loading takes about half a minute.")
    with Server(model, *ENGINE, *flags, waiting=still_loading) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        ask(client, server.name, "Say hello.")  # warm up
        before = server.counter(ACCEPTED), server.counter(DRAFTED)
        say(f"{title} answers:")
        answers = [ask(client, server.name, QUESTION, show)]
        answers += [ask(client, server.name, QUESTION) for _ in range(ROUNDS - 1)]
        after = server.counter(ACCEPTED), server.counter(DRAFTED)
        speed = statistics.median(answer.speed for answer in answers)
        say(f"\n{title}: {speed:.1f} tok/s. Shutting it down.\n")
    drafted = after[1] - before[1]
    return Run(answers[0].text, speed, (after[0] - before[0]) / drafted if drafted else 0.0)


def ask(client: OpenAI, model: str, question: str, piece: Callable[[str], None] = lambda text: None) -> Answer:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, times, tokens = "", [], 0
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
            text += chunk.choices[0].delta.content
            piece(chunk.choices[0].delta.content)
    seconds = times[-1] - times[0] if len(times) > 1 else float("inf")
    return Answer(text, (tokens - 1) / seconds)


def summary(plain: Run, spd: Run, same: bool) -> str:
    return (
        f"plain {plain.speed:.1f} tok/s | SPD {spd.speed:.1f} tok/s | speed-up {spd.speed / plain.speed:.2f}x"
        f" | acceptance {spd.acceptance:.2f} | identical {'yes' if same else 'no'}"
    )


def still_loading(seconds: int) -> None:
    say(f"  … still loading ({seconds} s)")


def show(text: str) -> None:
    print(text, end="", flush=True)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        print(error.log, file=sys.stderr)
        sys.exit(f"{error} Its last lines are above.")
    except KeyboardInterrupt:
        sys.exit(130)
