"""Write on-policy training data with vLLM: the target answers prompts, its own ones or those of a file.

Run the same command again to continue after an interruption.
"""

from __future__ import annotations

import argparse

from vllm_spd.cli.console import say

__all__ = ["HELP", "add_arguments", "run"]

HELP = "let the target write training data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="Hugging Face folder or name of the target")
    parser.add_argument("--out", required=True, help=".jsonl file to append to")
    parser.add_argument("--prompts", help="file of prompts: .jsonl (prompt, turns or messages) or one a line")
    parser.add_argument("--count", type=int, default=1000, help="prompts to answer (default: 1000, or the whole file)")
    parser.add_argument("--openings", help="text file: self-written prompts begin with one of its lines, at random")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampled half of the answers")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="share of answers written at T=0")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    parser.add_argument(
        "--chunk", type=int, default=128, help="prompts per batch; a batch is what an interruption loses"
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from vllm_spd.training.synth import SynthOptions, synthesise

    options = SynthOptions(**{field.name: getattr(args, field.name) for field in fields(SynthOptions)})
    records, tokens = synthesise(options)
    say(f"{args.out}: {records} answers, {tokens} tokens.")
    return 0
