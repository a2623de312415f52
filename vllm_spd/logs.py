"""Loggers that vLLM shows: it sets up a handler for loggers below its own name only."""

from __future__ import annotations

from logging import Logger

__all__ = ["logger_of"]


def logger_of(name: str) -> Logger:
    """The logger of one of SPD's modules, which appears in vLLM's log under vLLM's level and format."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.{name}")
