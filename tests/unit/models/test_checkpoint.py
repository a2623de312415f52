"""Checkpoint folders, and the conversion of files in the authors' layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.unit.training.plain import all_logits
from vllm_spd.cli import main
from vllm_spd.models.checkpoint import CheckpointError, expected_shapes, load_config, read_checkpoint, write_checkpoint
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.pdm import PDM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
TARGETS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_5": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
DRAFT_IDS = torch.tensor([1, 3, 4, 8, 9, 17, 20, 21, 22, 33, 34, 39])


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(family, folder) of a tiny random target whose final norm is not trivial."""
    config_class, model_class, more = TARGETS[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **more))
    with torch.no_grad():
        model.model.norm.weight.add_(torch.rand_like(model.model.norm.weight))
    folder = tmp_path_factory.mktemp("target") / request.param
    model.save_pretrained(folder)
    return request.param, folder


def authors_file(path: Path, family: str, target: Path, **changes: object) -> dict[str, Tensor]:
    """Write a file in the authors' version 11 layout and return its tensors. A change to None removes the key."""
    shapes = expected_shapes(shapes_config(family))
    torch.manual_seed(2)
    state = {
        name: torch.randn(shape) * 0.3 for name, shape in shapes.items() if name.startswith(("spec_layers", "lm_head"))
    }
    state |= {f"aggr_projs.{i}.weight": torch.randn(32, (i + 1) * 32) * 0.3 for i in range(4)}
    state["rotary_emb.inv_freq"] = torch.ones(4)
    config = {
        "hidden_size": 32,
        "vocab_size": 40,
        "draft_vocab_size": len(DRAFT_IDS),
        "num_stages": 4,
        "num_spec_layers": 2,
        "num_aggr_types": 4,
        "version": 11,
        "trained_with_use_deepest": True,
        "aggr_feature_bound": [0, 2, 6, 7],
        "base_model_path": str(target),
        "spec_intermediate_size_fallback": 48,
        "draft_token_ids": DRAFT_IDS.flip(0).tolist(),
    }
    state.update({name: value for name, value in changes.items() if "." in name})
    config.update({name: value for name, value in changes.items() if "." not in name})
    kept = {name: value for name, value in state.items() if value is not None}
    torch.save({"state_dict": kept, "config": {k: v for k, v in config.items() if v is not None}}, path)
    return kept


def shapes_config(family: str) -> PDMConfig:
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_hidden_layers", "tie_word_embeddings")}
    return PDMConfig(
        family=family, num_stages=4, stage_layers=[2] * 4, num_layers=2, draft_vocab_size=12, head="own", **sizes
    )


def test_converted_head_equals_the_algorithm(target: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = target
    raw = authors_file(tmp_path / "head.pt", family, folder)
    assert main(["convert", str(tmp_path / "head.pt"), str(tmp_path / "out")]) == 0

    model = PDM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert model.config.family == family
    assert model.config.anchors == [0, 2, 6, 7]
    assert model.draft_token_ids.tolist() == DRAFT_IDS.tolist()

    anchors = torch.randn(1, 10, 4, 32)
    with torch.no_grad():
        hidden = model.draft_hidden(anchors, torch.arange(10)[None], torch.ones(1, 10, dtype=torch.bool))
        logits = hidden @ model.head_rows().T
    plain = {name: value for name, value in raw.items() if name.startswith(("spec_layers", "aggr_projs"))}
    norm = read_norm(folder)
    plain["norm.weight"] = norm + 1 if family == "qwen3_5" else norm
    expected = all_logits(model.config, plain, raw["lm_head.weight"].flip(0), anchors[0])
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)


def read_norm(folder: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["model.norm.weight"]


BAD_FILES = [
    ({"version": 10}, "only version 11"),
    ({"version": None}, "version None"),
    ({"num_stages": None}, "lacks num_stages"),
    ({"num_stages": 3}, "unequal stages"),
    ({"trained_with_use_deepest": False}, "deepest"),
    ({"hidden_size": 64}, "another target"),
    ({"vocab_size": 41}, "another target"),
    ({"num_aggr_types": 3}, "as many"),
    ({"draft_token_ids": None}, "lacks draft_token_ids"),
    ({"draft_token_ids": [1, 2]}, "2 draft tokens"),
    ({"draft_token_ids": [99] * 12}, "increasing ids"),
    ({"num_spec_layers": 3}, r"lacks the tensor spec_layers\.2\."),
    ({"lm_head.weight": None}, r"lacks the tensor lm_head\.weight"),
    ({"aggr_projs.3.weight": None}, r"lacks the tensor aggr_projs\.3\.weight"),
    ({"aggr_projs.3.weight": torch.ones(32, 32)}, r"\[32, 32\], but \[32, 128\]"),
    ({"spec_layers.0.mlp.up_proj.weight": torch.ones(3, 32)}, r"\[3, 32\], but \[48, 32\]"),
    ({"spec_layers.0.self_attn.extra.weight": torch.ones(3)}, "no use for"),
    ({"base_model_path": None}, "pass --target"),
]


@pytest.mark.parametrize(("changes", "word"), BAD_FILES)
def test_bad_files_are_refused_in_one_sentence(changes: dict, word: str, llama_target: Path, tmp_path, capsys) -> None:
    authors_file(tmp_path / "head.pt", "llama", llama_target, **changes)
    assert main(["convert", str(tmp_path / "head.pt"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1

    assert re.search(word, message), message
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def llama_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Code:
        def __reduce__(self) -> tuple:
            return (print, ("this must not run",))

    torch.save({"state_dict": {}, "config": Code()}, tmp_path / "code.pt")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("code.pt", "list.pt", "text.pt", "absent.pt"):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 4
    assert captured.out == ""


def tensors_for(config: PDMConfig) -> dict[str, Tensor]:
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    return tensors | {"draft_token_ids": torch.arange(config.draft_vocab_size)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("head", ["own", "tied"])
@pytest.mark.parametrize("kind", ["pdm", "early_exit"])
def test_expected_shapes_are_the_modules(family: str, head: str, kind: str, tmp_path: Path) -> None:
    config = PDMConfig(
        family=family, head=head, kind=kind, num_stages=2, stage_layers=[2, 2], anchors=[0, 2], num_layers=2,
        vocab_size=9, draft_vocab_size=5,
    )  # fmt: skip
    module = {name: tuple(value.shape) for name, value in PDM(config).state_dict().items()}
    assert module == expected_shapes(config)
    write_checkpoint(tmp_path, config, tensors_for(config))
    again, tensors = read_checkpoint(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert PDM.from_pretrained(tmp_path).state_dict().keys() == tensors.keys()


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(tmp_path)
    config = PDMConfig(num_stages=2, stage_layers=[2, 2], anchors=[0, 2], vocab_size=9, draft_vocab_size=5)
    write_checkpoint(tmp_path, config, tensors_for(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no SPD drafter"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not sound"):
        load_config(tmp_path)


def test_tensors_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    config = PDMConfig(num_stages=2, stage_layers=[2, 2], anchors=[0, 2], vocab_size=9, draft_vocab_size=5)
    tensors = tensors_for(config) | {"norm.weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"norm\.weight as \[3\]"):
        write_checkpoint(tmp_path / "out", config, tensors)
    assert not (tmp_path / "out").exists()
