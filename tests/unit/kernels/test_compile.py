"""The kernels compile for NVIDIA GPUs, which needs none: what the interpreter cannot tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

SMALLER_GPUS = 99 * 1024
"""Bytes of shared memory that one program may use on compute capability 8.6 and 8.9."""
DIVISIBLE = {"hidden", "row_width", "num_out", "split_width", "hidden_stride", "residual_stride"}
"""Integers that are multiples of 16 in every model we know; Triton finds that out at launch."""
FLOAT_POINTERS = {"store_ptr", "weights_ptr", "hidden_ptr", "residual_ptr", "norm_weight_ptr", "head_ptr", "out_ptr"}
SUM_POINTERS = {"sums_ptr", "logits_ptr", "best_ptr"}
WIDE_POINTERS = {"positions_ptr", "slot_mapping_ptr", "newest_rows_ptr", "rows_ptr", "token_ids_ptr", "tokens_ptr"}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache of its own; these tests mean nothing where everything is interpreted."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no NVIDIA backend")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def triton_type(name: str, dtype: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name == "epsilon" else "i32"
    if name in FLOAT_POINTERS:
        return f"*{dtype}"
    return "*fp32" if name in SUM_POINTERS else "*i64" if name in WIDE_POINTERS else "*i32"


def build(kernel: Any, dtype: str, capability: int, **constants: Any) -> tuple[str, int]:
    """Compile for one GPU; PTX and bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else triton_type(name, dtype) for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name in DIVISIBLE)
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def assert_streams(ptx: str, shared: int) -> None:
    """Weights travel in 16-byte asynchronous copies, and the tiles fit."""
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)) > 4
    assert shared <= SMALLER_GPUS


def build_weight_kernels(dtype: str, rows: int, capability: int, project: dict, head: dict) -> None:
    """Both kernels that read weights; `project` and `head` are constants."""
    from vllm_spd.kernels.launch import values_per_step
    from vllm_spd.kernels.triton_head import BLOCK_TOKENS, NORM_TILE, best_of_part_kernel
    from vllm_spd.kernels.triton_projection import BLOCK_OUT, project_kernel

    operand = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}
    values = values_per_step(rows, 4 if dtype == "fp32" else 2)
    shared = {"OPERAND": operand[dtype], "BLOCK_ROWS": rows, "BLOCK_VALUES": values}
    assert_streams(*build(project_kernel, dtype, capability, BLOCK_OUT=BLOCK_OUT, **shared, **project))
    blocks = {"BLOCK_TOKENS": BLOCK_TOKENS, "BLOCK_NORM": NORM_TILE // rows}
    assert_streams(*build(best_of_part_kernel, dtype, capability, **blocks, **shared, **head))


@pytest.mark.parametrize(("dtype", "rows", "capability"), [("bf16", 16, 90), ("bf16", 64, 90), ("fp32", 64, 80)])
def test_weight_kernels(dtype: str, rows: int, capability: int) -> None:
    head = {"HAS_RESIDUAL": True, "HAS_ROWS": True}
    build_weight_kernels(dtype, rows, capability, {"HAS_ORDER": True}, head)


def test_weight_kernels_with_nothing_optional() -> None:
    """Triton compiles arguments that are None or 1 into the kernel."""
    project = {"order_ptr": None, "HAS_ORDER": False, "num_rows": 1, "splits": 1}
    head = {"residual_ptr": None, "rows_ptr": None, "HAS_RESIDUAL": False, "HAS_ROWS": False, "num_rows": 1}
    build_weight_kernels("fp16", 16, 80, project, head | {"tiles_per_part": 1})


@pytest.mark.parametrize("ones", [(), ("num_rows", "parts", "num_requests", "block_size")], ids=["any", "ones"])
def test_small_kernels(ones: tuple[str, ...]) -> None:
    from vllm_spd.kernels.triton_head import best_of_all_kernel
    from vllm_spd.kernels.triton_metadata import BLOCK_REQUESTS, draft_rows_kernel
    from vllm_spd.kernels.triton_projection import SUM_BLOCK, add_splits_kernel

    def compiles(kernel: Any, **constants: Any) -> None:
        build(kernel, "bf16", 90, **constants, **{name: 1 for name in ones if name in kernel.arg_names})

    compiles(add_splits_kernel, BLOCK=SUM_BLOCK)
    compiles(best_of_all_kernel, HAS_IDS=True, BLOCK=256)
    compiles(draft_rows_kernel, BLOCK_REQUESTS=BLOCK_REQUESTS, BLOCK_DISTANCES=16)
