"""Batches for the drafter: a torch dataset over samples, its collator and a sampler that keeps padding small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from vllm_spd.training.cache import FeatureCache
from vllm_spd.training.data import Sample

__all__ = ["LengthBatchedSampler", "SampleDataset", "collate"]

POOL = 24
"""Batches per pool: samples are sorted by length within a pool only, so that their order stays random."""


class SampleDataset(Dataset[dict[str, Any]]):
    """Samples with their cached features, or bare ones when there is no cache (then the trainer asks the target)."""

    def __init__(
        self, samples: Sequence[Sample], layers: Sequence[int], cache: FeatureCache | None, indices: Sequence[int]
    ) -> None:
        """`indices` picks samples; `layers` are the anchors followed by the target's last layer."""
        self.samples, self.layers, self.cache, self.indices = samples, list(layers), cache, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self.indices[item]
        sample = self.samples[index]
        features = {
            "input_ids": torch.from_numpy(sample.input_ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(sample.loss),
        }
        if self.cache is not None:
            features["hidden"] = self.cache.hidden_states(index, self.layers)
            features["top1"], features["logsumexp"] = self.cache.teaching(index)
        return features

    def lengths(self) -> list[int]:
        return [len(self.samples[index].input_ids) for index in self.indices]

    def sources(self) -> list[str]:
        return [self.samples[index].source for index in self.indices]


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded batch: input_ids, loss_mask, position_ids [B, S]; if cached also hidden [B, S, A+1, H], top1 [R]."""
    batch = {name: pad_sequence([item[name] for item in items], True) for name in ("input_ids", "loss_mask")}
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).contiguous()
    if "hidden" in items[0]:
        batch["hidden"] = pad_sequence([item["hidden"] for item in items], True)
        batch["top1"] = torch.cat([item["top1"] for item in items])
        batch["logsumexp"] = torch.cat([item["logsumexp"] for item in items])
    return batch


class LengthBatchedSampler(Sampler[int]):
    """Random order in which a batch holds samples of similar length. The same for the same seed and epoch."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = np.asarray(lengths), batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer at the start of every epoch, also after a resume."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        whole: list[np.ndarray] = []
        rest: list[np.ndarray] = []
        for start in range(0, len(order), POOL * self.batch_size):
            pool = order[start : start + POOL * self.batch_size]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            for first in range(0, len(pool), self.batch_size):
                batch = pool[first : first + self.batch_size]
                (whole if len(batch) == self.batch_size else rest).append(batch)
        random.shuffle(whole)
        for batch in whole + rest:
            yield from batch.tolist()
