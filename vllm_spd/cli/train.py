"""Train a drafter for a target model. Run the same command again to continue after an interruption."""

from __future__ import annotations

import argparse

from vllm_spd.cli.console import numbers, say

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a drafter for a target model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_what(parser.add_argument_group("what to train"))
    add_drafter(parser.add_argument_group("drafter"))
    add_data(parser.add_argument_group("data"))
    add_schedule(parser.add_argument_group("schedule"))


def add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", required=True, help="Hugging Face folder or name of the target")
    group.add_argument("--data", required=True, action="append", help=".jsonl, text file or dataset folder; repeatable")
    group.add_argument("--out", required=True, help="checkpoint folder to write")
    group.add_argument(
        "--stages",
        type=numbers,
        default=(2,),
        help="number of pipeline stages, or layers of each stage: 18,12 (default: 2 that take the same time)",
    )
    group.add_argument("--target-name", help="name of the target to write into the checkpoint (default: --target)")
    group.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")


def add_drafter(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kind", choices=("pdm", "early_exit"), default="pdm")
    group.add_argument("--layers", type=int, default=1, dest="num_layers", help="decoder layers of the drafter")
    group.add_argument(
        "--anchors", type=numbers, help="hidden states it reads, 0,… (default: by the first stage's length)"
    )
    group.add_argument("--depth-schedule", choices=("paper", "after_first_stage"), default="after_first_stage")
    group.add_argument("--head", choices=("own", "tied"), default="tied", help="tied: use the target's LM-head rows")
    group.add_argument("--draft-vocab", type=int, default=8192, help="tokens the drafter can propose")
    group.add_argument(
        "--init-layers", type=numbers, help='target layers to copy; "" for random ones (default: late ones)'
    )
    group.add_argument("--init-from", help="checkpoint folder to start from instead of the target's layers")
    group.add_argument("--intermediate-size", type=int, help="MLP width of its layers (default: the target's)")


def add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-length", type=int, default=1024, help="tokens after which a sample is cut")
    group.add_argument("--limit", type=int, help="use that many samples at most")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave bad JSONL lines out instead of stopping")
    group.add_argument("--held-out", type=float, default=0.02, help="share of samples kept for evaluation")
    group.add_argument("--cache", default=None, help="folder for target features: computed once, read every epoch")
    group.add_argument("--cache-layers", type=numbers, default=(), help="further hidden states to cache")


def add_schedule(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=float, default=6.0)
    group.add_argument("--max-steps", type=int, default=-1, help="stop after that many steps instead of epochs")
    group.add_argument("--batch-size", type=int, default=8, help="sequences per device and step")
    group.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    group.add_argument("--lr", type=float, default=3e-4, help="peak learning rate of the layers")
    group.add_argument("--projection-lr", type=float, default=6e-4, help="peak learning rate of the projections")
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--warmup", type=float, default=0.03, help="share of the steps, or steps if 1 or more")
    group.add_argument("--schedule", default="cosine", help="learning-rate schedule of transformers' Trainer")
    group.add_argument("--fp32", action="store_false", dest="bf16", help="no bfloat16 autocast")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--eval-steps", type=int, default=200)
    group.add_argument("--save-steps", type=int, default=200)


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from accelerate import PartialState

    from vllm_spd.training.run import TrainOptions, train

    values = {field.name: getattr(args, field.name) for field in fields(TrainOptions)}
    values["data"] = tuple(values["data"])
    summary = train(TrainOptions(**values))
    held_out = summary["held_out"]
    if PartialState().is_main_process:
        say(
            f"{args.out}: held-out acceptance {held_out['eval_acceptance']:.3f} at T=0, "
            f"{held_out['eval_acceptance_t1']:.3f} at T=1 after {summary['steps']} steps."
        )
    return 0
