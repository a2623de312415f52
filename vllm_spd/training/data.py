"""Training text: chat JSONL, plain text or a dataset folder, as token ids with the assistant's part marked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

__all__ = ["DataReport", "Sample", "read_records", "read_samples"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One sequence. `loss[p]` is true where the token after position p was written by the assistant."""

    input_ids: np.ndarray
    """int32 [S]."""
    loss: np.ndarray
    """bool [S]."""
    source: str = ""


@dataclass
class DataReport:
    """What reading found."""

    samples: int = 0
    tokens: int = 0
    assistant_tokens: int = 0
    bad_lines: list[str] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.tokens} tokens ({self.assistant_tokens} of the assistant), "
            f"{self.truncated} cut to the length limit, {self.dropped} without assistant tokens left out, "
            f"{len(self.bad_lines)} bad lines skipped"
        )


def read_samples(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    skip_bad_lines: bool = False,
    limit: int | None = None,
) -> tuple[list[Sample], DataReport]:
    """All samples of these files and folders, cut to `max_length` tokens, at most `limit` of them.

    Raises ValueError naming file and line for a bad line (unless skipped), and when nothing usable is left.
    """
    report = DataReport()
    samples: list[Sample] = []
    for path in paths:
        for where, record in read_records(Path(path), skip_bad_lines, report):
            if limit is not None and len(samples) >= limit:
                break
            sample = encode(record, tokenizer, f"{Path(path).stem}", where)
            add(sample, max_length, samples, report)
    if not samples:
        raise ValueError(f"No usable sample in {', '.join(map(str, paths))}: {report}.")
    return samples, report


def add(sample: Sample, max_length: int, samples: list[Sample], report: DataReport) -> None:
    if len(sample.input_ids) > max_length:
        report.truncated += 1
        # The last kept position may still predict the token that was cut off: the target's forward needs no label.
        sample = Sample(sample.input_ids[:max_length], sample.loss[:max_length], sample.source)
    if not sample.loss.any():
        report.dropped += 1
        return
    samples.append(sample)
    report.samples += 1
    report.tokens += len(sample.input_ids)
    report.assistant_tokens += int(sample.loss.sum())


def read_records(
    path: Path, skip_bad_lines: bool = False, report: DataReport | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) for every record of a .jsonl file, a text file (one record) or a dataset folder."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a .jsonl file, a text file or a dataset folder.")
    if path.is_dir():
        yield from read_dataset(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from read_jsonl(path, skip_bad_lines, report or DataReport())
    else:
        yield str(path), {"text": path.read_text(encoding="utf-8")}


def read_jsonl(path: Path, skip_bad_lines: bool, report: DataReport) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            problem, record = parse_line(line)
            if problem is None:
                yield where, record
            elif skip_bad_lines:
                report.bad_lines.append(where)
                logger.warning("%s skipped: %s", where, problem)
            else:
                raise ValueError(f"{where}: {problem}; fix the line or pass --skip-bad-lines.")


def parse_line(line: str) -> tuple[str | None, dict[str, Any]]:
    """(what is wrong or None, record) of one JSONL line."""
    if not line.strip():
        return "the line is empty", {}
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not valid JSON ({error.msg})", {}
    return record_problem(record), record if isinstance(record, dict) else {}


def record_problem(record: Any) -> str | None:
    if not isinstance(record, dict):
        return "not a JSON object"
    if "messages" in record:
        return messages_problem(record["messages"])
    if "prompt" in record:
        pair = (record["prompt"], record.get("response"))
        return None if all(isinstance(text, str) for text in pair) else "prompt and response must both be texts"
    if isinstance(record.get("text"), str):
        return None
    return "it holds none of messages, prompt/response, text"


def messages_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of at least one message"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            return "every message needs a role and a text as content"
    return None


def read_dataset(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a dataset folder: one written by `save_to_disk`, or one that holds parquet or JSON files."""
    import datasets

    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(str(path))
    else:
        loaded = datasets.load_dataset(str(path))
    splits = loaded.values() if isinstance(loaded, dict) else [loaded]
    for split in splits:
        for number, record in enumerate(split):
            problem = record_problem(record)
            if problem is not None:
                raise ValueError(f"{path}, row {number}: {problem}.")
            yield f"{path}, row {number}", record


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: str, where: str) -> Sample:
    """One record as token ids; with plain text every position counts as the assistant's."""
    if "messages" in record:
        ids, written = encode_messages(record["messages"], tokenizer, where)
    elif "prompt" in record:
        ids, written = encode_pair(record, tokenizer, where)
    else:
        ids = tokenizer(record["text"])["input_ids"]
        written = [True] * len(ids)
    loss = np.zeros(len(ids), dtype=bool)
    loss[:-1] = written[1:]
    return Sample(np.asarray(ids, dtype=np.int32), loss, str(record.get("source", source)))


def encode_pair(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[list[int], list[bool]]:
    """Prompt and response; a response cut off by a token limit (`finish` = "length") gets no end-of-turn token."""
    messages = [{"role": "user", "content": record["prompt"]}]
    prompt = template(tokenizer, messages, True, where)
    response = list(tokenizer(record["response"], add_special_tokens=False)["input_ids"])
    if record.get("finish", "stop") != "length" and tokenizer.eos_token_id is not None:
        response.append(tokenizer.eos_token_id)
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def encode_messages(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """A whole conversation; what follows a generation prompt up to the end of that message is the assistant's."""
    ids: list[int] = []
    written: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template(tokenizer, messages[:index], True, where)
        after = template(tokenizer, messages[: index + 1], False, where)
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise ValueError(f"{where}: the chat template rewrites earlier turns: give single-turn conversations.")
        written += [False] * (len(before) - len(ids)) + [True] * (len(after) - len(before))
        ids = after
    return ids, written


def template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], open_turn: bool, where: str
) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(f"{where}: this tokenizer has no chat template: train on plain text or use an instruct model.")
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn, tokenize=True, return_dict=False)
    )
