"""Measure a drafter on data it has not seen: acceptance per data set, and what that means for a pipeline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_spd.cli.console import numbers, say, table

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure a drafter's acceptance on held-out data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", help="checkpoint folder of the drafter")
    parser.add_argument("--target", help="Hugging Face folder or name (default: the one in the drafter's config)")
    parser.add_argument("--data", required=True, action="append", help="file or folder; repeatable, one set each")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--stages", type=numbers, default=(2, 4, 8), help="stage counts to predict (default: 2,4,8)")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--device", default="cpu")


def run(args: argparse.Namespace) -> int:
    from vllm_spd.training.evaluate import evaluate_head

    results = evaluate_head(args.head, args.data, args.target, args.max_length, args.batch_size, args.device)
    header = [
        "set",
        "tokens",
        "T=0",
        "T=1",
        *(f"n={n} tokens/cycle" for n in args.stages),
        *(f"n={n} speed-up" for n in args.stages),
    ]
    say(table(header, [row_of(name, result, args.stages) for name, result in results.items()]))
    say("")
    distances = [str(k + 1) for k in range(len(next(iter(results.values()))["by_distance"]))]
    distances[-1] += "+"
    say("T=0 acceptance of the k-th draft after a rejection:")
    say(table(["set", *distances], [[name, *map(rate, result["by_distance"])] for name, result in results.items()]))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def row_of(name: str, result: dict[str, Any], stages: tuple[int, ...]) -> list[str]:
    from vllm_spd.training.measure import speedup, tokens_per_cycle

    greedy = result["acceptance"]
    return [
        name,
        str(result["tokens"]),
        rate(greedy),
        rate(result["acceptance_t1"]),
        *(f"{tokens_per_cycle(greedy, n):.3f}" for n in stages),
        *(f"{speedup(greedy, n):.2f}" for n in stages),
    ]


def rate(value: float) -> str:
    return f"{value:.3f}"
