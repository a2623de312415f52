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

    problems = [problem] if (problem := version_problem(vllm.__version__)) else []
    for symbol in SYMBOLS:
        if args.all:
            sys.stdout.write(f"{symbol.path}  since {symbol.since}: {symbol.why}\n")
        if (problem := symbol.problem()) is None:
            continue
        if symbol.only:
            sys.stdout.write(f"{problem}; needed for {symbol.only} only\n")
        else:
            problems.append(problem)
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    verdict = "does not fit SPD" if problems else "fits SPD"
    sys.stdout.write(f"vLLM {vllm.__version__} {verdict}: {len(SYMBOLS)} symbols checked, {len(problems)} problems.\n")
    return 1 if problems else 0
