"""Real prompts, a real drafter, one request at a time: SPD beside every plain way to use the same machine.

    python -m benchmarks.prompts MODEL HEAD DATA.jsonl... [--every 3] [--json FILE]

Each line of DATA has the user's text in `turns` (the first is used) or `prompt`. All engines answer a few prompts in
turn, so that a change of the machine's speed meets all of them. Tokens per second are those of decoding, from the first
to the last token of each answer, summed over the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.cycle import SETTLE_S, engine, print_line, text_of, timed_in_child
from tests.engines import chats_in_child

SPD = "SPD PP=2"
PLAIN_PP = {"pipeline_parallel_size": 2, "worker_cls": "benchmarks.plain_pp.PlainPPWorker"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
COST = re.compile(
    r"SPD: (\d+) tokens in (\d+) cycles .*acceptance ([\d.]+).*per cycle ([\d.]+) ms of drafting, ([\d.]+) ms of it "
    r"waiting for (\d+) bytes"
)


@dataclass(frozen=True)
class Row:
    """One engine. `identical`: share of answers that equal plain PP=1's; bfloat16 breaks near-ties differently."""

    engine: str
    tokens: int
    tokens_per_s: float
    spd_speedup: float
    identical: float


@dataclass(frozen=True)
class Cost:
    """One cycle of SPD in ms: the whole, the drafter, and the drafter's wait for other stages; and their bytes."""

    acceptance: float
    cycle_ms: float
    drafting_ms: float
    waiting_ms: float
    exchanged_bytes: float


def main() -> None:
    options = parse()
    prompts = list(read(options.data))[:: options.every]
    answers = play(options, prompts)
    names = [field.name for field in fields(Row)]
    print_line(names, names)
    rows = list(table(answers))
    for row in rows:
        print_line([text_of(value) for value in asdict(row).values()], names)
    cost = cost_of(answers["log"], next(row.tokens_per_s for row in rows if row.engine == SPD))
    print(cost)
    if options.json:
        result = {"rows": [asdict(row) for row in rows], "cost": asdict(cost)}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=128, help="per answer, at most (default: 128)")
    parser.add_argument("--every", type=int, default=1, help="use every k-th prompt (default: 1, all)")
    parser.add_argument("--group", type=int, default=10, help="prompts before the next engine's turn (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser.parse_args()


def read(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            yield record["turns"][0] if "turns" in record else record["prompt"]


def play(options: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    """Answers as (token ids, seconds) by engine, and under `log` what SPD said of itself."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    kinds: dict[str, dict[str, Any]] = {
        "plain PP=1, 1 thread": {},
        "plain PP=1, all cores": {"env": {"VLLM_CPU_OMP_THREADS_BIND": cores}},
        "plain PP=2": PLAIN_PP,
        "ngram PP=1": {"speculative_config": NGRAM},
        SPD: {"pipeline_parallel_size": 2, "speculative_config": {"method": "spd", "model": str(options.head)}},
    }
    answers: dict[str, Any] = {name: [] for name in kinds}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(options.model, **kind)) for name, kind in kinds.items()}
        ids = engines[SPD].run(chats_in_child, list(prompts))
        for start in tqdm(range(0, len(ids), options.group), unit="group"):
            for name, each in engines.items():
                time.sleep(SETTLE_S)
                answers[name] += each.run(answers_in_child, ids[start : start + options.group], options.tokens)
        answers["log"] = engines[SPD].log.read_text(errors="replace")
    return answers


def answers_in_child(llm: Any, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], float]]:
    return [timed_in_child(llm, prompt, {"temperature": 0, "max_tokens": tokens}) for prompt in prompts]


def table(answers: dict[str, Any]) -> Iterator[Row]:
    plain = [token_ids for token_ids, _ in answers["plain PP=1, 1 thread"]]
    rows = [row_of(name, runs, plain) for name, runs in answers.items() if name != "log"]
    spd = next(row.tokens_per_s for row in rows if row.engine == SPD)
    for row in rows:
        yield replace(row, spd_speedup=spd / row.tokens_per_s)


def row_of(name: str, runs: Sequence[tuple[list[int], float]], plain: Sequence[list[int]]) -> Row:
    tokens = sum(len(token_ids) - 1 for token_ids, _ in runs)
    same = [token_ids == expected for (token_ids, _), expected in zip(runs, plain, strict=True)]
    return Row(name, tokens, tokens / sum(seconds for _, seconds in runs), 1.0, sum(same) / len(same))


def cost_of(log: str, tokens_per_s: float) -> Cost:
    """Means over the lines that SPD logs every ten seconds, weighted by their cycles."""
    lines = [tuple(map(float, match.groups())) for match in COST.finditer(log)]
    tokens, cycles = (sum(line[i] for line in lines) for i in range(2))
    acceptance, drafting, waiting, size = (sum(line[i] * line[1] for line in lines) / cycles for i in range(2, 6))
    return Cost(acceptance, 1e3 / tokens_per_s * tokens / cycles, drafting, waiting, size)


if __name__ == "__main__":
    main()
