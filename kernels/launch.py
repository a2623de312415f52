"""What the launchers ask about the device."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

__all__ = ["num_multiprocessors", "operand", "rows_per_tile", "values_per_step"]

WITHOUT_GPU = 16
"""Multiprocessors to plan for under Triton's interpreter."""

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@lru_cache(maxsize=16)
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device."""
    if device.type != "cuda":
        return WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def operand(dtype: torch.dtype) -> tl.dtype:
    """Type of the operands of tl.dot; the interpreter would multiply the bits of bfloat16 (Triton issue 11584).

    Raises:
        ValueError: the kernels do not know this dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"The kernels know float16, bfloat16 and float32, not {dtype}.")
    if dtype is torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return DTYPES[dtype]


def rows_per_tile(num_rows: int) -> int:
    """Rows in one program's tile: what tl.dot needs at least, up to 64 while every weight is still read once."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def values_per_step(rows: int, itemsize: int) -> int:
    """Values of the reduction per step: 256 bytes of a row, half of that where tiles are tall, so that four steps fit
    into the 99 KiB of shared memory of the smaller GPUs."""
    return (256 if rows == 16 else 128) // itemsize
