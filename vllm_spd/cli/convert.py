"""Convert a drafter file of the SPD authors (version 11, .pt) into a checkpoint folder."""

from __future__ import annotations

import argparse

from vllm_spd.cli.console import say

__all__ = ["HELP", "add_arguments", "run"]

HELP = "convert an authors' .pt file into a checkpoint folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="the authors' file, such as Qwen3-8B_s4_l4.pt")
    parser.add_argument("out", help="checkpoint folder to write")
    parser.add_argument("--target", help="Hugging Face folder or name of the target (default: the one the file names)")


def run(args: argparse.Namespace) -> int:
    from vllm_spd.models.checkpoint import convert_v11

    config = convert_v11(args.source, args.out, args.target)
    say(
        f"{args.out}: {config.num_layers} {config.family} layers, {config.num_stages} stages, "
        f"anchors {config.anchors}, draft vocabulary {config.draft_vocab_size}."
    )
    return 0
