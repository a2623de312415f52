"""The trainable module shows every row exactly what inference shows it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.training.plain import all_logits
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.mask import block_mask, merged_blocks, visibility
from vllm_spd.training.pdm import PDM

ROPE = {"rope_type": "default", "rope_theta": 1000.0}


def small(family: str = "llama", **changes: object) -> PDMConfig:
    values = {
        "family": family,
        "num_stages": 2,
        "stage_layers": [4, 4],
        "anchors": [0, 2, 4, 8],
        "num_layers": 2,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": ROPE | ({"partial_rotary_factor": 0.5} if family == "qwen3_5" else {}),
        "head": "own",
    }
    return PDMConfig(**(values | changes))


def random_pdm(config: PDMConfig) -> PDM:
    torch.manual_seed(1)
    model = PDM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


CASES = [
    ("llama", {}),
    ("llama", {"num_layers": 1}),
    ("llama", {"num_layers": 3, "depth_schedule": "paper"}),
    ("llama", {"num_stages": 4, "stage_layers": [2, 2, 2, 2]}),
    ("llama", {"num_stages": 4, "stage_layers": [2, 2, 2, 2], "depth_schedule": "paper", "anchors": [0, 2, 6, 7, 8]}),
    ("llama", {"num_stages": 3, "stage_layers": [0, 4, 4]}),
    ("llama", {"num_stages": 1, "stage_layers": [8], "attention_bias": True}),
    ("qwen2", {}),
    ("qwen3", {"depth_schedule": "paper"}),
    ("qwen3_5", {"depth_schedule": "paper"}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_training_equals_inference_row_by_row(family: str, changes: dict) -> None:
    model = random_pdm(small(family, **changes))
    length = 11
    anchors = torch.randn(2, length, len(model.config.anchors), 32, dtype=torch.double)
    positions = torch.arange(length).expand(2, -1)
    with torch.no_grad():
        hidden = model.draft_hidden(anchors, positions, torch.ones(2, length, dtype=torch.bool))
        logits = (hidden @ model.lm_head.weight.T).view(2, length, -1)
    for sequence in range(2):
        expected = all_logits(model.config, model.state_dict(), model.lm_head.weight.detach(), anchors[sequence])
        torch.testing.assert_close(logits[sequence], expected, atol=1e-6, rtol=1e-6)


def test_only_chosen_rows_are_computed_and_they_are_the_same() -> None:
    model = random_pdm(small())
    anchors, positions = torch.randn(1, 9, 4, 32, dtype=torch.double), torch.arange(9)[None]
    chosen = torch.tensor([[False, True, False, True, True, False, False, False, True]])
    with torch.no_grad():
        every = model.draft_hidden(anchors, positions, torch.ones_like(chosen))
        some = model.draft_hidden(anchors, positions, chosen)
    torch.testing.assert_close(some, every[chosen[0]])


def test_padding_at_the_end_changes_nothing() -> None:
    model = random_pdm(small())
    anchors = torch.randn(1, 9, 4, 32, dtype=torch.double)
    padded = torch.cat([anchors, torch.randn(1, 5, 4, 32, dtype=torch.double)], dim=1)
    rows = torch.ones(1, 9, dtype=torch.bool)
    with torch.no_grad():
        short = model.draft_hidden(anchors, torch.arange(9)[None], rows)
        long = model.draft_hidden(padded, torch.arange(14)[None], torch.nn.functional.pad(rows, (0, 5)))
    torch.testing.assert_close(short, long)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_block_mask_against_the_sentence_that_defines_it(stages: int) -> None:
    layout = small(num_stages=stages, stage_layers=[2] * stages, anchors=[0, 2]).layout
    length = 5
    mask = block_mask(layout, length)
    assert mask.shape == ((stages + 1) * length,) * 2
    for query in range(stages + 1):
        for t in range(length):
            for key in range(stages + 1):
                for past in range(length):
                    seen = past <= t and key == min(stages, query + t - past)
                    assert bool(mask[query * length + t, key * length + past]) == seen


def test_merged_blocks_see_the_same_rows() -> None:
    layout = small(num_stages=3, stage_layers=[2, 3, 3]).layout
    apart = visibility(layout, 0, [frozenset({d}) for d in range(4)], 6)
    groups = merged_blocks(0, ["a", "a", "b", "c"])
    assert groups == [(0, {0, 1}), (2, {2}), (3, {3})]
    together = visibility(layout, 0, [members for _, members in groups], 6)
    a0, a1, b, c = apart.chunk(4, dim=1)
    assert torch.equal(together, torch.cat([a0 | a1, b, c], dim=1))


def test_early_exit_reads_the_first_stage_only() -> None:
    for layers in (0, 1):
        model = random_pdm(small(kind="early_exit", num_layers=layers, anchors=[0, 4]))
        assert len(model.aggr_projs) == 0
        anchors, positions = torch.randn(1, 6, 2, 32, dtype=torch.double), torch.arange(6)[None]
        rows = torch.ones(1, 6, dtype=torch.bool)
        with torch.no_grad():
            before = model.draft_hidden(anchors, positions, rows)
            anchors[:, :, 0] += 1
            assert torch.equal(before, model.draft_hidden(anchors, positions, rows))
            anchors[:, 2, 1] += 1
            changed = (before != model.draft_hidden(anchors, positions, rows)).any(1)
        assert changed.tolist() == [False, False, True, *[layers == 1] * 3]


def test_save_and_load(tmp_path) -> None:
    model = random_pdm(small("qwen3")).float()
    model.draft_token_ids.copy_(torch.arange(5, 17))
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = PDM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    anchors, rows = torch.randn(1, 4, 4, 32), torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = (m.eval().draft_hidden(anchors, torch.arange(4)[None], rows) for m in (model, again))
    assert torch.equal(ours, theirs)


def test_a_tied_head_must_be_bound_and_is_not_saved(tmp_path) -> None:
    model = random_pdm(small(head="tied"))
    with pytest.raises(RuntimeError, match="bind_head"):
        model.head_rows()
    model.bind_head(torch.randn(12, 32))
    model.save_pretrained(tmp_path)
    assert PDM.from_pretrained(tmp_path).tied_rows is None


def test_loss_counts_only_rows_whose_target_is_in_the_draft_vocabulary() -> None:
    model = random_pdm(small()).float()
    model.bind_head(torch.randn(12, 32))
    inputs = {
        "anchors": torch.randn(1, 5, 4, 32),
        "position_ids": torch.arange(5)[None],
        "loss_mask": torch.tensor([[False, True, True, True, False]]),
        "final": torch.randn(3, 32),
    }
    with torch.no_grad():
        outside = model(**inputs, target_top1=torch.tensor([30, 31, 32]))
        inside = model(**inputs, target_top1=torch.tensor([3, 31, 32]))
        probabilities = (model.norm(inputs["final"]) @ model.tied_rows.T).log_softmax(-1)
    assert outside.loss == 0
    assert (outside.agreed, outside.rows) == (0, 3)
    expected = (probabilities.exp() * (probabilities - inside.logits.log_softmax(-1))).sum(-1)[0]
    torch.testing.assert_close(inside.loss, expected)
