"""Feature cache on disk: the target runs once over the data, the drafter trains on it for many epochs.

A folder named by the hash of (target weights, samples, hidden layers) holds one bfloat16 file [tokens, H] per hidden
layer, the target's argmax and logsumexp per assistant row, and `progress.json`, so that an interrupted build goes on
where it was. `progress.json` also holds the CRC-32 of every file, and whatever is read or continued is checked by it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vllm_spd.training.data import Sample
from vllm_spd.training.target import Target

__all__ = ["FeatureCache"]

logger = logging.getLogger(__name__)

BATCH_TOKENS = 1024
RESERVE = 256 << 20
"""Bytes of free disk space that must remain after a build."""


class FeatureCache:
    """Reads a complete cache: item i is sample i's hidden states and teacher values."""

    def __init__(self, folder: Path, samples: Sequence[Sample], layers: Sequence[int], hidden_size: int) -> None:
        """Raises ValueError when files are missing or have the wrong size."""
        self.folder = folder
        self.layers = tuple(layers)
        self.samples = samples
        self.starts = np.cumsum([0] + [len(sample.input_ids) for sample in samples])
        self.row_starts = np.cumsum([0] + [int(sample.loss.sum()) for sample in samples])
        tokens, rows = int(self.starts[-1]), int(self.row_starts[-1])
        self.hidden = {
            layer: open_file(folder, layer_file(layer), np.uint16, (tokens, hidden_size)) for layer in layers
        }
        self.top1 = open_file(folder, "top1.bin", np.int32, (rows,))
        self.logsumexp = open_file(folder, "logsumexp.bin", np.float32, (rows,))

    def hidden_states(self, index: int, layers: Sequence[int]) -> Tensor:
        """Hidden states [S, len(layers), H] bfloat16 of one sample."""
        start, stop = self.starts[index], self.starts[index + 1]
        parts = [torch.from_numpy(self.hidden[layer][start:stop]).view(torch.bfloat16) for layer in layers]
        return torch.stack(parts, dim=1)

    def teaching(self, index: int) -> tuple[Tensor, Tensor]:
        """The target's argmax [R] int64 and logsumexp [R] float32 at one sample's assistant rows."""
        start, stop = self.row_starts[index], self.row_starts[index + 1]
        top1 = torch.from_numpy(self.top1[start:stop].astype(np.int64))
        return top1, torch.from_numpy(self.logsumexp[start:stop].copy())

    @classmethod
    def build(cls, root: Path, target: Target, samples: Sequence[Sample], layers: Sequence[int]) -> FeatureCache:
        """Open the cache for these inputs under `root`, computing what is missing.

        Raises OSError with a clear message when the disk is full; what is written so far is kept and continued.
        """
        layers = sorted(set(layers))
        folder = root / cache_key(target, samples, layers)
        width = target.config.hidden_size
        done, checksums = read_progress(folder)
        check_files(folder, checksums, sizes_of(samples[:done], layers, width))
        if done < len(samples):
            check_space(root, folder, samples, len(layers), width)
            folder.mkdir(parents=True, exist_ok=True)
            logger.info("Filling %s from sample %d of %d.", folder, done, len(samples))
            try:
                fill(folder, target, samples, layers, done, checksums)
            except OSError as error:
                raise disk_error(error, folder) from error
        return cls(folder, samples, layers, width)


def cache_key(target: Target, samples: Sequence[Sample], layers: Sequence[int]) -> str:
    """Name of the cache folder: changes with the target's weights, the samples and the layers."""
    digest = hashlib.sha256(f"2 {target.fingerprint()} {list(layers)} {len(samples)}".encode())
    for sample in samples:
        digest.update(np.int64(len(sample.input_ids)).tobytes())
        digest.update(sample.input_ids.tobytes())
        digest.update(sample.loss.tobytes())
    return digest.hexdigest()[:16]


def sizes_of(samples: Sequence[Sample], layers: Sequence[int], width: int) -> dict[str, int]:
    """Bytes of each file of a cache that holds these samples."""
    tokens = sum(len(sample.input_ids) for sample in samples)
    rows = sum(int(sample.loss.sum()) for sample in samples)
    return {
        **{layer_file(layer): tokens * width * 2 for layer in layers},
        "top1.bin": rows * 4,
        "logsumexp.bin": rows * 4,
    }


def fill(
    folder: Path,
    target: Target,
    samples: Sequence[Sample],
    layers: Sequence[int],
    done: int,
    checksums: dict[str, int],
) -> None:
    tokens = sum(len(sample.input_ids) for sample in samples[:done])
    offsets = sizes_of(samples[:done], layers, target.config.hidden_size)
    files = {name: open_at(folder / name, offset) for name, offset in offsets.items()}
    try:
        with tqdm(total=sum(len(sample.input_ids) for sample in samples), initial=tokens, unit="tok") as bar:
            for batch in batches(samples, done):
                outputs = compute(target, batch, layers)
                for (name, file), values in zip(files.items(), outputs, strict=True):
                    content = values.tobytes()
                    file.write(content)
                    file.flush()
                    checksums[name] = zlib.crc32(content, checksums.get(name, 0))
                done += len(batch)
                write_progress(folder, done, checksums)
                bar.update(sum(len(sample.input_ids) for sample in batch))
    finally:
        for file in files.values():
            file.close()


def compute(target: Target, batch: Sequence[Sample], layers: Sequence[int]) -> list[np.ndarray]:
    """One array per cache file for a batch of samples, in sample order and without padding."""
    lengths = [len(sample.input_ids) for sample in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    valid = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    ids[valid] = torch.from_numpy(np.concatenate([sample.input_ids for sample in batch]).astype(np.int64))
    loss = torch.from_numpy(np.concatenate([sample.loss for sample in batch]))
    device = target.head_weight.device
    states = target.hidden_states(ids.to(device), [*layers, target.num_layers])[valid.to(device)]
    teaching = target.teach(states[loss.to(device), -1])
    hidden = [
        states[:, index].to(torch.bfloat16).contiguous().view(torch.uint16).cpu().numpy()
        for index in range(len(layers))
    ]
    return [*hidden, teaching.top1.int().cpu().numpy(), teaching.logsumexp.cpu().numpy()]


def batches(samples: Sequence[Sample], start: int) -> Iterator[Sequence[Sample]]:
    """Consecutive samples in groups of at most BATCH_TOKENS padded tokens (one sample at least)."""
    group: list[Sample] = []
    longest = 0
    for sample in samples[start:]:
        longest = max(longest, len(sample.input_ids))
        if group and longest * (len(group) + 1) > BATCH_TOKENS:
            yield group
            group, longest = [], len(sample.input_ids)
        group.append(sample)
    if group:
        yield group


def layer_file(layer: int) -> str:
    return f"hidden_{layer:03d}.bin"


def open_file(folder: Path, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    path = folder / name
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.exists() or path.stat().st_size < expected:
        raise ValueError(f"{path} does not have the expected {expected} bytes: delete {folder} to compute it again.")
    return np.memmap(path, dtype=dtype, mode="c", shape=shape)


def open_at(path: Path, offset: int) -> BinaryIO:
    """Open for writing at `offset`, dropping whatever an interrupted write left behind it."""
    if offset and (not path.exists() or path.stat().st_size < offset):
        raise ValueError(f"{path} is shorter than its progress file says: delete {path.parent} to compute it again.")
    file = path.open("r+b" if offset else "wb")
    file.truncate(offset)
    file.seek(offset)
    return file


def check_files(folder: Path, checksums: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raises ValueError when the first `sizes` bytes of a file are not those that were written."""
    for name, checksum in checksums.items():
        path, left, found = folder / name, sizes[name], 0
        with path.open("rb") if path.exists() else contextlib.nullcontext(io.BytesIO()) as file:
            while left and (block := file.read(min(left, 1 << 24))):
                left, found = left - len(block), zlib.crc32(block, found)
        if left or found != checksum:
            raise ValueError(f"{path} is not what was written: delete {folder} to compute it again.")


def read_progress(folder: Path) -> tuple[int, dict[str, int]]:
    """Samples that are done, and the checksum of each file up to there."""
    path = folder / "progress.json"
    if not path.exists():
        return 0, {}
    content = json.loads(path.read_text())
    return int(content["samples"]), dict(content["crc32"])


def write_progress(folder: Path, done: int, checksums: Mapping[str, int]) -> None:
    fresh = folder / "progress.json.new"
    fresh.write_text(json.dumps({"samples": done, "crc32": checksums}))
    fresh.replace(folder / "progress.json")


def check_space(root: Path, folder: Path, samples: Sequence[Sample], num_layers: int, width: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    tokens = sum(len(sample.input_ids) for sample in samples)
    present = sum(file.stat().st_size for file in folder.glob("*.bin")) if folder.exists() else 0
    needed = tokens * (num_layers * width * 2 + 8) - present
    free = shutil.disk_usage(root).free
    if needed + RESERVE > free:
        raise OSError(
            errno.ENOSPC,
            f"The feature cache needs {needed / 1e9:.1f} GB and {root} has {free / 1e9:.1f} GB free: "
            f"free some space, choose another --cache folder, or pass --no-cache",
        )


def disk_error(error: OSError, folder: Path) -> OSError:
    if error.errno != errno.ENOSPC:
        return error
    return OSError(
        errno.ENOSPC,
        f"The disk is full: free some space and run the same command again; {folder} is kept and continued",
    )
