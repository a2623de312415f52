"""What subcommands write to the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["numbers", "say", "table"]


def say(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown with padded columns."""
    widths = [max(len(str(line[i])) for line in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(str(c).ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines
    )


def numbers(text: str) -> tuple[int, ...]:
    """Argument type for comma-separated whole numbers; an empty text gives ()."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between them") from None
