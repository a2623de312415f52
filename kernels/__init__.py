"""What the drafter's cycle does on the first rank, in few launches: Triton on CUDA tensors, plain torch elsewhere.

Each function has a torch reference beside it (`*_reference`, any device), which defines the result, and a Triton twin
in `triton_*.py`, which is imported on the first CUDA call only. `docs/kernels.md` tells how they work.
"""

from __future__ import annotations

from vllm_spd.kernels.head import HeadArgmax, norm_head_argmax, norm_head_argmax_reference
from vllm_spd.kernels.metadata import DraftRows, draft_rows, draft_rows_reference
from vllm_spd.kernels.projection import fused_rows, fused_rows_reference, pack_projections

__all__ = [
    "DraftRows",
    "HeadArgmax",
    "draft_rows",
    "draft_rows_reference",
    "fused_rows",
    "fused_rows_reference",
    "norm_head_argmax",
    "norm_head_argmax_reference",
    "pack_projections",
]
