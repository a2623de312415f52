"""The command line: its options are frozen here, its errors are one sentence."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from vllm_spd.cli import build_parser, main
from vllm_spd.cli.console import numbers, table
from vllm_spd.training.run import TrainOptions
from vllm_spd.training.synth import SynthOptions

FROZEN = {
    "train": "target data out stages device target-name kind layers anchors depth-schedule head draft-vocab "
    "init-layers init-from intermediate-size max-length limit skip-bad-lines held-out cache cache-layers epochs "
    "max-steps batch-size accumulate lr projection-lr weight-decay warmup schedule fp32 seed eval-steps save-steps",
    "synth": "target out prompts count openings temperature greedy-share max-tokens chunk max-model-len "
    "tensor-parallel-size seed",
    "eval-head": "target data max-length batch-size stages json device",
    "convert": "target",
}


def options_of(command: str) -> set[str]:
    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    actions = subparsers.choices[command]._actions
    return {name[2:] for action in actions for name in action.option_strings if name.startswith("--")}


@pytest.mark.parametrize("command", FROZEN)
def test_options_are_frozen(command: str) -> None:
    assert options_of(command) == set(FROZEN[command].split()) | {"help", "debug"}


@pytest.mark.parametrize(
    ("command", "options", "needed"),
    [
        ("train", TrainOptions, ["--target", "t", "--data", "d", "--out", "o"]),
        ("synth", SynthOptions, ["--target", "t", "--out", "o"]),
    ],
)
def test_defaults_agree_with_the_library(command: str, options: type, needed: list[str]) -> None:
    args = vars(build_parser().parse_args([command, *needed]))
    defaults = options(**({"target": "t", "out": "o"} | ({"data": ("d",)} if command == "train" else {})))
    for name, value in vars(defaults).items():
        if name not in ("target", "data", "out"):
            assert args[name] == value, name


def test_help_imports_nothing_heavy() -> None:
    check = (
        "import sys; from vllm_spd.cli import build_parser; build_parser(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["convert", str(tmp_path / "absent.pt"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("vllm-spd convert: ")
    assert message.count("\n") == 1
    with pytest.raises(FileNotFoundError):
        main(["convert", "--debug", str(tmp_path / "absent.pt"), str(tmp_path / "out")])


def test_numbers() -> None:
    assert numbers("18,12") == (18, 12)
    assert numbers("") == ()
    with pytest.raises(argparse.ArgumentTypeError, match="whole numbers"):
        numbers("a,b")


def test_table() -> None:
    assert table(["a", "long"], [["x", "1"], ["yy", "2"]]).splitlines() == [
        "| a  | long |",
        "| -- | ---- |",
        "| x  | 1    |",
        "| yy | 2    |",
    ]
