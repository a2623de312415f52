"""Reading training text: what counts as the assistant's, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.models import tiny_tokenizer
from vllm_spd.training.data import read_samples
from vllm_spd.training.vocab import coverage, frequent_tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def assistant_text(tokenizer: PreTrainedTokenizerBase, sample: object) -> str:
    return tokenizer.decode(sample.input_ids[1:][sample.loss[:-1]])


def test_prompt_and_response(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "hi", "response": "yes", "finish": "stop"},
        {"prompt": "hi", "response": "cut", "finish": "length"},
        {"prompt": "hi", "response": "plain"},
    )
    samples, report = read_samples([path], tokenizer, 100)
    assert [assistant_text(tokenizer, s) for s in samples] == ["yes<|im_end|>", "cut", "plain<|im_end|>"]
    assert [s.source for s in samples] == ["a"] * 3
    assert (report.samples, report.assistant_tokens) == (3, 4 + 3 + 6)
    text = tokenizer.decode(samples[0].input_ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"


def test_conversations_mark_every_assistant_turn(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
    ]
    samples, _ = read_samples([write(tmp_path / "c.jsonl", {"messages": messages})], tokenizer, 200)
    assert assistant_text(tokenizer, samples[0]) == "one<|im_end|>\ntwo<|im_end|>\n"


def test_plain_text_counts_everywhere(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "book.txt").write_text("once upon")
    sample = read_samples([tmp_path / "book.txt"], tokenizer, 100)[0][0]
    assert sample.loss.tolist() == [True] * 8 + [False]


def test_dataset_folders(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "p", "response": "r"}] * 3
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    for name in ("saved", "parquet"):
        assert read_samples([tmp_path / name], tokenizer, 100)[1].samples == 3


BAD_LINES = [
    ("", "the line is empty"),
    ("{", "not valid JSON"),
    ("[1]", "not a JSON object"),
    ({"question": "?"}, "none of messages"),
    ({"prompt": "p"}, "must both be texts"),
    ({"prompt": "p", "response": None}, "must both be texts"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "a role and a text"),
]


@pytest.mark.parametrize(("line", "word"), BAD_LINES)
def test_bad_lines_stop_or_are_counted(
    line: object, word: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = {"prompt": "p", "response": "r"}
    path = write(tmp_path / "d.jsonl", good, line, good)
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{word}"):
        read_samples([path], tokenizer, 100)
    samples, report = read_samples([path], tokenizer, 100, skip_bad_lines=True)
    assert len(samples) == 2
    assert report.bad_lines == [f"{path}:2"]
    assert "1 bad lines skipped" in str(report)


def test_long_samples_are_cut_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "e.jsonl", {"prompt": "p", "response": "r" * 50}, {"prompt": "p" * 99, "response": "r"})
    samples, report = read_samples([path], tokenizer, 40)
    assert [len(s.input_ids) for s in samples] == [40]
    assert (report.truncated, report.dropped) == (2, 1)


def test_nothing_usable_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_samples([tmp_path / "absent.jsonl"], tokenizer, 10)
    with pytest.raises(ValueError, match="No usable sample"):
        read_samples([write(tmp_path / "f.jsonl", "{")], tokenizer, 10, skip_bad_lines=True)


def test_chat_data_needs_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "g.jsonl", {"prompt": "p", "response": "r"})
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match="no chat template"):
            read_samples([path], tokenizer, 10)
    finally:
        tokenizer.chat_template = template


def test_draft_vocabulary(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    samples, _ = read_samples([write(tmp_path / "h.jsonl", {"prompt": "zz", "response": "aab"})], tokenizer, 99)
    ids = frequent_tokens(samples, 512, 2)
    a, b, end = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "<|im_end|>"))
    assert a in ids
    assert ids.tolist() == sorted(ids.tolist())
    assert coverage(samples, ids) == 0.75
    assert set(frequent_tokens(samples, 512, 3).tolist()) == {a, b, end}
    assert np.array_equal(frequent_tokens(samples, 512, 512).numpy(), np.arange(512))
    with pytest.raises(ValueError, match="use 1 to 512"):
        frequent_tokens(samples, 512, 513)
