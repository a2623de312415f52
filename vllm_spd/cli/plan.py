"""Show how a target's layers would be shared out over pipeline stages."""

from __future__ import annotations

import argparse
import sys

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show how a target's layers are shared out over the stages"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and number of stages."""
    parser.add_argument("target", help="Hugging Face folder or name of the target")
    parser.add_argument("--stages", type=int, default=2, help="pipeline-parallel size, 2 or more (default 2)")
    parser.add_argument(
        "--drafter-parameters", type=int, default=0, help="what a drafter on the first rank reads per cycle (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the split in the form of the key `stage_layers`, and each stage's load."""
    from transformers import AutoConfig

    from vllm_spd.plan import describe, split_layers, target_costs

    if args.stages < 2:
        raise ValueError("A pipeline has 2 stages or more: set --stages.")
    text = AutoConfig.from_pretrained(args.target).get_text_config()
    costs = target_costs(text, args.drafter_parameters)
    split = split_layers(text.num_hidden_layers, args.stages, costs)
    sys.stdout.write(f"stage_layers {','.join(map(str, split))}\n{describe(split, costs)}\n")
    return 0
