"""Norm, draft head and argmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm_spd.kernels import HeadArgmax, norm_head_argmax

EPSILON = 1e-6
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of logits with a spread of about 1."""


@dataclass(frozen=True)
class Case:
    """Sizes of one call. Rows are picked out of twice as many when `pick`."""

    dtype: torch.dtype
    hidden: int
    num_tokens: int
    num_rows: int
    pick: bool = False
    residual: bool = False
    ids: bool = True

    def inputs(self, device: str = "cpu") -> dict[str, Tensor | float | None]:
        """Arguments of `norm_head_argmax` by name."""
        generator = torch.Generator().manual_seed(self.num_tokens)
        total = 2 * self.num_rows if self.pick else self.num_rows

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, self.dtype)

        return {
            "hidden_NH": 3 * floats(total, self.hidden),
            "norm_weight_H": floats(self.hidden),
            "epsilon": EPSILON,
            "head_VH": floats(self.num_tokens, self.hidden) / self.hidden**0.5,
            "token_ids_V": 3 * torch.arange(self.num_tokens, device=device) + 5 if self.ids else None,
            "rows_R": torch.arange(total - 1, -1, -2, device=device) if self.pick else None,
            "residual_NH": floats(total, self.hidden) if self.residual else None,
        }


CASES = [
    Case(torch.float32, 64, 1, 1),
    Case(torch.float32, 80, 1000, 3, ids=False),
    Case(torch.bfloat16, 576, 200, 1, pick=True, residual=True),
    Case(torch.bfloat16, 64, 70 * 64 + 7, 2, residual=True),
    Case(torch.float16, 576, 130, 17, pick=True),
    Case(torch.float32, 64, 100, 70),
    Case(torch.bfloat16, 80, 65, 40, residual=True, pick=True),
    Case(torch.float32, 64, 100, 0),
    Case(torch.float32, 64, 100, 0, pick=True),
]


def plain_logits(inputs: dict) -> Tensor:
    """[R, V] in float64."""
    hidden = inputs["hidden_NH"]
    if inputs["residual_NH"] is not None:
        hidden = hidden + inputs["residual_NH"]
    if inputs["rows_R"] is not None:
        hidden = hidden[inputs["rows_R"]]
    hidden = hidden.double()
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + inputs["epsilon"]).rsqrt()
    return normed * inputs["norm_weight_H"].double() @ inputs["head_VH"].double().T


def assert_best(found: HeadArgmax, inputs: dict) -> None:
    """The token found has the highest logit, as far as the dtype can tell."""
    logits, tolerance = plain_logits(inputs), TOLERANCES[inputs["hidden_NH"].dtype]
    assert (found.token_ids.dtype, found.logits.dtype) == (torch.int64, torch.float32)
    ids = inputs["token_ids_V"]
    indices = found.token_ids if ids is None else (found.token_ids - 5) // 3
    assert ids is None or torch.equal(ids[indices], found.token_ids)
    of_found = logits.gather(1, indices[:, None]).squeeze(1)
    best = logits.max(-1).values if len(logits) else of_found
    torch.testing.assert_close(of_found, best, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.logits.double(), of_found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_finds_the_best_token(case: Case) -> None:
    inputs = case.inputs()
    assert_best(norm_head_argmax(**inputs), inputs)


def check_twin(device: str, case: Case) -> None:
    from vllm_spd.kernels.triton_head import norm_head_argmax_triton

    inputs = case.inputs(device)
    assert_best(norm_head_argmax_triton(*inputs.values()), inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_agrees(run: Callable, case: Case) -> None:
    run(check_twin, case)


def head_function(device: str, twin: bool) -> Callable[..., HeadArgmax]:
    if not twin:
        return norm_head_argmax
    from vllm_spd.kernels.triton_head import norm_head_argmax_triton

    def call(hidden: Tensor, norm: Tensor, epsilon: float, head: Tensor, ids: Tensor | None = None) -> HeadArgmax:
        return norm_head_argmax_triton(hidden, norm, epsilon, head, ids, None, None)

    return call


def check_ties(device: str, twin: bool, dtype: torch.dtype) -> None:
    """Rows with one value each make exact logits: sqrt(H) times a small integer."""
    best = head_function(device, twin)
    hidden = torch.eye(3, 64, dtype=dtype, device=device)
    head = torch.zeros(300, 64, dtype=dtype, device=device)
    head[[7, 8, 100, 299], 0] = 2
    head[[299, 64, 63], 1] = 1
    head[:, 2] = -1
    ids = 1000 - torch.arange(300, device=device)
    found = best(hidden, torch.ones(64, dtype=dtype, device=device), 0.0, head, ids)
    assert found.token_ids.tolist() == [1000 - 7, 1000 - 63, 1000 - 0]
    assert found.logits.tolist() == [16, 8, -8]


def check_nan(device: str, twin: bool, dtype: torch.dtype) -> None:
    """A NaN in a row spoils this row; one in the head spoils all; infinities are ordinary values."""
    best = head_function(device, twin)
    norm = torch.ones(64, dtype=dtype, device=device)
    hidden = torch.ones(3, 64, dtype=dtype, device=device)
    head = torch.zeros(300, 64, dtype=dtype, device=device)
    head[200] = 0.125
    spoiled = hidden.clone()
    spoiled[1, 5] = float("nan")
    assert best(spoiled, norm, 0.0, head).token_ids.tolist() == [200, -1, 200]
    assert best(spoiled, norm, 0.0, head).logits.isnan().tolist() == [False, True, False]
    spoiled[1, 5] = float("inf")
    assert best(spoiled, norm, 0.0, head, torch.arange(300, device=device)).token_ids.tolist() == [200, -1, 200]
    head[130] = float("-inf")
    assert best(hidden, norm, 0.0, head).token_ids.tolist() == [200] * 3
    assert best(hidden, norm, 0.0, torch.full_like(head, float("-inf"))).token_ids.tolist() == [0] * 3
    head[299, 3] = float("nan")
    assert best(hidden, norm, 0.0, head).token_ids.tolist() == [-1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [check_ties, check_nan])
def test_reference_on_ties_and_nan(check: Callable, dtype: torch.dtype) -> None:
    check("cpu", False, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [check_ties, check_nan])
def test_triton_on_ties_and_nan(run: Callable, check: Callable, dtype: torch.dtype) -> None:
    run(check, True, dtype)


def test_inputs_that_do_not_fit_are_refused() -> None:
    inputs = Case(torch.float32, 8, 10, 2, pick=True, residual=True).inputs()
    refused = [
        ({"norm_weight_H": torch.ones(7)}, r"Rows of 8 values do not fit a norm of shape \[7\]"),
        ({"head_VH": torch.ones(0, 8)}, r"a head of shape \[0, 8\]"),
        ({"token_ids_V": torch.arange(9)}, r"The head has 10 rows, but 9 token ids are given\."),
        ({"residual_NH": torch.ones(1, 8)}, r"The residual has shape \[1, 8\], the rows \[4, 8\]\."),
        ({"head_VH": torch.ones(10, 8).half()}, r"the head is torch.float16\."),
        ({"head_VH": torch.ones(8, 10).T}, "must be contiguous"),
        ({"hidden_NH": torch.ones(8, 4).T}, r"Each row must be contiguous\."),
    ]
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            norm_head_argmax(**inputs | change)
