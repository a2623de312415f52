"""Check whether the installed vLLM fits: its version, and every symbol that SPD relies on."""

from __future__ import annotations

import argparse
import sys

__all__ = ["HELP", "add_arguments", "run"]

HELP = "check whether the installed vLLM fits SPD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options but whether to list what is in order too."""
    parser.add_argument("--all", action="store_true", help="list every symbol with its reason, not only problems")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 if SPD can run on this vLLM, 1 if not."""
    import vllm

    from vllm_spd.upstream import SYMBOLS, version_problem

    found = [version_problem(vllm.__version__), *(symbol.problem() for symbol in SYMBOLS)]
    problems = [problem for problem in found if problem is not None]
    if args.all:
        lines = (f"{symbol.path}  since {symbol.since}: {symbol.why}\n" for symbol in SYMBOLS)
        sys.stdout.writelines(lines)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    verdict = "does not fit SPD" if problems else "fits SPD"
    sys.stdout.write(f"vLLM {vllm.__version__} {verdict}: {len(SYMBOLS)} symbols checked, {len(problems)} problems.\n")
    return 1 if problems else 0
