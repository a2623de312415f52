"""Training from end to end on a tiny random target: it learns, continues where it stopped, notices what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_spd.cli import main
from vllm_spd.models.checkpoint import read_checkpoint
from vllm_spd.training.features import LengthBatchedSampler
from vllm_spd.training.run import TrainOptions, train
from vllm_spd.training.trainer import NonFiniteLoss, PDMTrainer

CHANCE = 1 / 512


@pytest.fixture
def options(tiny: Path, on_policy: Path, tmp_path: Path) -> TrainOptions:
    return TrainOptions(
        target=str(tiny),
        data=(str(on_policy),),
        out=str(tmp_path / "head"),
        stages=(6, 2),
        anchors=(0, 6, 8),
        draft_vocab=512,
        held_out=0.2,
        max_steps=6,
        batch_size=8,
        eval_steps=3,
        save_steps=3,
        bf16=False,
        device="cpu",
    )


@pytest.mark.timeout(120)
def test_smoke_training_beats_chance_widely(tiny: Path, on_policy: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["train", "--target", str(tiny), "--data", str(on_policy), "--out", str(tmp_path / "head")]
    arguments += ["--stages", "7,1", "--anchors", "0,7,8", "--draft-vocab", "512", "--held-out", "0.2", "--fp32"]
    arguments += ["--cache", str(tmp_path / "cache"), "--max-steps", "40", "--lr", "2e-3", "--projection-lr", "2e-3"]
    assert main(arguments) == 0
    assert "held-out acceptance" in capsys.readouterr().out
    summary = json.loads((tmp_path / "head" / "training.json").read_text())
    assert summary["held_out"]["eval_acceptance"] > 20 * CHANCE
    assert summary["curve"]

    report = tmp_path / "report.json"
    assert main(["eval-head", str(tmp_path / "head"), "--data", str(on_policy), "--json", str(report)]) == 0
    results = json.loads(report.read_text())
    assert results["all"]["acceptance"] > 20 * CHANCE
    assert results["on-policy"] == results["all"]
    assert "| on-policy |" in capsys.readouterr().out


def weights(options: TrainOptions) -> dict[str, torch.Tensor]:
    return read_checkpoint(options.out)[1]


def break_at(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Let `action(loss)` replace the loss, or raise, at one training step."""
    compute = PDMTrainer.compute_loss

    def broken(self: PDMTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return action(loss) if self.state.global_step == step else loss

    monkeypatch.setattr(PDMTrainer, "compute_loss", broken)


def interrupt(_: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def test_an_interrupted_run_continues_and_ends_the_same(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(options)
    cut = replace(options, out=str(tmp_path / "cut"))
    with monkeypatch.context() as patch:
        break_at(patch, 4, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(cut)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="other values of lr"):
        train(replace(cut, lr=1.0))
    summary = train(cut)
    assert summary["steps"] == 6
    for name, tensor in weights(options).items():
        torch.testing.assert_close(weights(cut)[name], tensor)


@pytest.mark.parametrize("poison", [lambda loss: loss * torch.nan, lambda loss: loss * torch.inf])
def test_a_broken_gradient_stops_before_it_reaches_the_weights(
    poison: Any, options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, 4, poison)
    with pytest.raises(NonFiniteLoss, match=r"step 4: lower --lr .* last good checkpoint"):
        train(options)
    _, tensors = read_checkpoint(Path(options.out) / "checkpoints" / "checkpoint-3")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_training_without_a_cache_sees_the_same_features(options: TrainOptions, tmp_path: Path) -> None:
    live = train(replace(options, max_steps=2))
    cached = train(replace(options, max_steps=2, out=str(tmp_path / "other"), cache=str(tmp_path / "cache")))
    assert abs(live["held_out"]["eval_acceptance"] - cached["held_out"]["eval_acceptance"]) < 0.05


@pytest.mark.parametrize("layers", [0, 1])
def test_early_exit_drafters_train_too(layers: int, options: TrainOptions) -> None:
    train(replace(options, kind="early_exit", num_layers=layers, head="own", max_steps=2))
    config, tensors = read_checkpoint(options.out)
    assert (config.kind, config.anchors, config.num_layers) == ("early_exit", [0, 6], layers)
    assert "lm_head.weight" in tensors


def test_start_from_another_drafter(options: TrainOptions, tmp_path: Path) -> None:
    train(options)
    again = replace(options, out=str(tmp_path / "more"), init_from=options.out, lr=0.0, projection_lr=0.0)
    train(replace(again, target_name="a/name"))
    assert read_checkpoint(again.out)[0].base_model == "a/name"
    for name, tensor in weights(options).items():
        assert torch.equal(weights(again)[name], tensor)
    with pytest.raises(ValueError, match="other stages"):
        train(replace(again, stages=(4, 4), out=str(tmp_path / "no")))
    with pytest.raises(ValueError, match="other layers"):
        train(replace(again, draft_vocab=100, out=str(tmp_path / "no")))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stages": (6, 3)}, "hold 9 layers, but the target has 8"),
        ({"stages": (9,)}, "cannot fill 9 stages"),
        ({"anchors": (0, 9)}, "last layer"),
        ({"draft_vocab": 513}, "use 1 to 512"),
        ({"init_layers": (8,)}, "between 0 and 7"),
        ({"intermediate_size": 16, "init_layers": (7,)}, "other shapes"),
        ({"limit": 1}, "at least 2 samples"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict, word: str, options: TrainOptions) -> None:
    with pytest.raises(ValueError, match=word):
        train(replace(options, **change))


@pytest.mark.parametrize(("num_layers", "stages"), [(1, [3, 5]), (3, [2, 6])])
def test_stages_by_number_take_the_same_time(num_layers: int, stages: list[int], options: TrainOptions) -> None:
    """The tiny target's head costs next to nothing, so the first stage gives away what the drafter takes."""
    options = replace(options, stages=(2,), anchors=None, num_layers=num_layers, max_steps=1)
    assert train(options)["stage_layers"] == stages


@pytest.mark.slow
def test_two_processes_train_one_drafter(tiny: Path, on_policy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [str(Path(sys.executable).parent / "vllm-spd"), "train", "--target", str(tiny), "--data", str(on_policy)]
    command += ["--stages", "7,1", "--anchors", "0,7,8", "--draft-vocab", "512", "--held-out", "0.2", "--fp32"]
    command += ["--cache", str(tmp_path / "cache"), "--max-steps", "30", "--lr", "2e-3", "--projection-lr", "2e-3"]
    command += ["--out", str(tmp_path / "head"), "--device", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held-out acceptance") == 1
    summary = json.loads((tmp_path / "head" / "training.json").read_text())
    assert summary["steps"] == 30 and summary["held_out"]["eval_acceptance"] > 15 * CHANCE


def test_batches_hold_similar_lengths_and_every_sample_once() -> None:
    lengths = [n % 37 for n in range(1000)]
    sampler = LengthBatchedSampler(lengths, 10, seed=3)
    order = list(sampler)
    assert sorted(order) == list(range(1000))
    spread = [max(b) - min(b) for b in ([lengths[i] for i in order[k : k + 10]] for k in range(0, 960, 10))]
    assert sum(spread) / len(spread) < 8
    assert order == list(LengthBatchedSampler(lengths, 10, seed=3))
    sampler.set_epoch(1)
    assert order != list(sampler)
