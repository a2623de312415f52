"""`vllm-spd`: one subcommand per module, offering `HELP`, `add_arguments(parser)`, `run(args) -> exit status`."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "train": "vllm_spd.cli.train",
    "synth": "vllm_spd.cli.synth",
    "eval-head": "vllm_spd.cli.eval_head",
    "convert": "vllm_spd.cli.convert",
    "doctor": "vllm_spd.cli.doctor",
    "plan": "vllm_spd.cli.plan",
}
"""Subcommand -> module. Modules import only light things at the top; torch, transformers and vLLM inside `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; known errors become one sentence on stderr and status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return int(args.run(args))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if args.debug:
            raise
        sys.stderr.write(f"vllm-spd {args.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"\nvllm-spd {args.command}: interrupted; the same command continues where it was.\n")
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-spd", description="Speculative Pipeline Decoding for vLLM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
