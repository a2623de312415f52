"""The draft vocabulary: the target tokens that the drafter can propose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_spd.training.data import Sample

__all__ = ["coverage", "frequent_tokens"]


def frequent_tokens(samples: Sequence[Sample], vocab_size: int, size: int) -> Tensor:
    """Sorted ids [size] int64 of the most frequent assistant tokens; ties and unseen places go to lower ids.

    Raises ValueError when `size` exceeds the target's vocabulary.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"A draft vocabulary of {size} tokens is not possible: use 1 to {vocab_size}.")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(assistant_tokens(sample), minlength=vocab_size)
    ranked = np.argsort(-counts, kind="stable")
    return torch.from_numpy(np.sort(ranked[:size]))


def coverage(samples: Sequence[Sample], token_ids: Tensor) -> float:
    """Share of the assistant's tokens that the draft vocabulary holds: an upper bound of the acceptance rate."""
    tokens = np.concatenate([assistant_tokens(sample) for sample in samples])
    return float(np.isin(tokens, token_ids.numpy()).mean())


def assistant_tokens(sample: Sample) -> np.ndarray:
    return sample.input_ids[1:][sample.loss[:-1]]
