"""Hidden states come from the right places, and the cache gives back what the target said."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from vllm_spd.training import cache as cache_module
from vllm_spd.training.cache import FeatureCache, cache_key
from vllm_spd.training.data import Sample
from vllm_spd.training.target import Target

LAYERS = [0, 3, 8]


def test_hidden_states_are_layer_outputs_before_the_final_norm(target: Target) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    found = target.hidden_states(ids, [0, 3, 8])
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True)
    torch.testing.assert_close(found[:, :, 0], states.hidden_states[0])
    torch.testing.assert_close(found[:, :, 1], states.hidden_states[3])
    torch.testing.assert_close(target.body.norm(found[:, :, 2]), states.hidden_states[8])
    teaching = target.teach(found[0, :, 2], chunk=3)
    assert torch.equal(teaching.top1, states.logits[0].argmax(-1))
    torch.testing.assert_close(teaching.logsumexp, states.logits[0].logsumexp(-1))
    with pytest.raises(ValueError, match="has 8 layers"):
        target.hidden_states(ids, [9])


def test_a_tokenizer_of_another_model_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens([f"more{n}" for n in range(9)])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_: tokenizer)
    with pytest.raises(ValueError, match="521 tokens, the model only 512"):
        Target.load(str(tiny))


def test_cache_returns_what_the_target_computed(target: Target, samples: list[Sample], tmp_path: Path) -> None:
    cache = FeatureCache.build(tmp_path, target, samples[:6], LAYERS)
    for index in (0, 3, 5):
        ids = torch.from_numpy(samples[index].input_ids.astype(np.int64))[None]
        states = target.hidden_states(ids, [3, 8])[0]
        torch.testing.assert_close(cache.hidden_states(index, [3, 8]).float(), states, atol=0.1, rtol=0.01)
        top1, logsumexp = cache.teaching(index)
        teaching = target.teach(states[torch.from_numpy(samples[index].loss), 1])
        assert torch.equal(top1, teaching.top1)
        torch.testing.assert_close(logsumexp, teaching.logsumexp)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_interrupted_build_continues(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "BATCH_TOKENS", 100)
    FeatureCache.build(tmp_path / "whole", target, samples[:8], LAYERS)
    compute, calls = cache_module.compute, []

    def failing(*args: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return compute(*args)

    monkeypatch.setattr(cache_module, "compute", failing)
    with pytest.raises(OSError, match="The disk is full: free some space and run the same command again"):
        FeatureCache.build(tmp_path / "parts", target, samples[:8], LAYERS)
    progress = next((tmp_path / "parts").rglob("progress.json"))
    assert 0 < json.loads(progress.read_text())["samples"] < 8
    with next((tmp_path / "parts").rglob("hidden_003.bin")).open("ab") as file:
        file.write(b"half a batch")
    FeatureCache.build(tmp_path / "parts", target, samples[:8], LAYERS)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    calls.clear()
    FeatureCache.build(tmp_path / "parts", target, samples[:8], LAYERS)
    assert not calls


def test_too_little_space_is_noticed_before_the_work(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "RESERVE", 1 << 60)
    with pytest.raises(OSError, match=r"needs .* GB and .* free some space"):
        FeatureCache.build(tmp_path, target, samples[:2], LAYERS)


@pytest.mark.parametrize("count", [2, 3], ids=["whole", "to be continued"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_files_are_noticed(
    damage: str, count: int, target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "cache_key", lambda *args: "key")
    FeatureCache.build(tmp_path, target, samples[:2], LAYERS)
    file = next(tmp_path.rglob("hidden_008.bin"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut" else content)
    with pytest.raises(ValueError, match=r"hidden_008\.bin is not what was written: delete"):
        FeatureCache.build(tmp_path, target, samples[:count], LAYERS)


def test_the_key_follows_weights_samples_and_layers(target: Target, samples: list[Sample]) -> None:
    key = cache_key(target, samples[:3], LAYERS)
    assert key == cache_key(target, samples[:3], LAYERS)
    assert key != cache_key(target, samples[:4], LAYERS)
    assert key != cache_key(target, samples[:3], [0, 8])
    first = samples[0]
    marked = Sample(first.input_ids, np.zeros_like(first.loss), first.source)
    assert key != cache_key(target, [marked, *samples[1:3]], LAYERS)
    weight = target.body.norm.weight.data
    weight[0] += 1
    assert key != cache_key(target, samples[:3], LAYERS)
    weight[0] -= 1
