"""On-policy data: prompts and answers written by the target itself, through vLLM's offline engine."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

__all__ = ["Answer", "SynthOptions", "Writer", "synthesise"]

PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_P = 0.95
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class SynthOptions:
    """What `vllm-spd synth` can be told; see its --help."""

    target: str
    out: str
    prompts: str | None = None
    count: int = 1000
    openings: str | None = None
    temperature: float = 0.7
    greedy_share: float = 0.5
    max_tokens: int = 256
    chunk: int = 128
    max_model_len: int = 2048
    tensor_parallel_size: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """One generated text."""

    text: str
    finish: str
    """"stop" or "length"."""
    tokens: int


class Writer(Protocol):
    """What generates text; vLLM in production, a stub in tests."""

    def user_turns(self, openings: Sequence[str]) -> list[Answer]:
        """Continue the chat template's open user turn after each opening."""

    def answers(self, prompts: Sequence[str], temperature: float) -> list[Answer]:
        """Answer each prompt as the assistant."""


def synthesise(options: SynthOptions, writer: Writer | None = None) -> tuple[int, int]:
    """Append answers to `options.out` until it holds the wanted number. Returns (records, answer tokens) in the file.

    What is there already counts, so an interrupted run continues; the order of prompts follows from the seed.
    """
    if not 0.0 <= options.greedy_share <= 1.0:
        raise ValueError(f"--greedy-share is {options.greedy_share}: use 0 to 1.")
    out = Path(options.out)
    prompts = read_prompts(Path(options.prompts)) if options.prompts else None
    wanted = len(prompts) if prompts is not None else options.count
    done, tokens = count_records(out)
    if done >= wanted:
        return done, tokens
    writer = writer or VllmWriter(options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file, tqdm(total=wanted, initial=done, unit="answer") as bar:
        while done < wanted:
            size = min(options.chunk, wanted - done)
            chosen = prompts[done : done + size] if prompts is not None else invent(options, writer, done, size)
            for record in answer(options, writer, chosen, done):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                tokens += record["n"]
            file.flush()
            os.fsync(file.fileno())
            done += len(chosen)
            bar.update(len(chosen))
    return done, tokens


def invent(options: SynthOptions, writer: Writer, done: int, size: int) -> list[str]:
    """Prompts by the target itself; turns that did not end, or are empty, are tried again."""
    dice = random.Random(f"{options.seed} {done}")
    openings = read_lines(Path(options.openings)) if options.openings else [""]
    prompts: list[str] = []
    for _ in range(20):
        picked = [dice.choice(openings) for _ in range(size - len(prompts))]
        turns = zip(picked, writer.user_turns(picked), strict=True)
        prompts += [(o + t.text).strip() for o, t in turns if t.finish == "stop" and (o + t.text).strip()]
        if len(prompts) >= size:
            return prompts
    raise RuntimeError("The target writes no complete user turns: give prompts with --prompts.")


def answer(options: SynthOptions, writer: Writer, prompts: Sequence[str], done: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(f"{options.seed} {done} temperature")
    heat = [0.0 if dice.random() < options.greedy_share else options.temperature for _ in prompts]
    for temperature in sorted(set(heat)):
        mine = [prompt for prompt, own in zip(prompts, heat, strict=True) if own == temperature]
        for prompt, result in zip(mine, writer.answers(mine, temperature), strict=True):
            yield {
                "prompt": prompt,
                "response": result.text,
                "temperature": temperature,
                "finish": result.finish,
                "n": result.tokens,
            }


def read_prompts(path: Path) -> list[str]:
    """Prompts of a .jsonl file (prompt, first of turns, or first user message) or of a text file, one a line."""
    lines = read_lines(path)
    if path.suffix != ".jsonl":
        return lines
    return [prompt_of(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg}); fix or remove the line.") from None
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return str(record["prompt"])
        if record.get("turns"):
            return str(record["turns"][0])
        for message in record.get("messages") or []:
            if message.get("role") == "user":
                return str(message["content"])
    raise ValueError(f"{where}: it holds none of prompt, turns, messages with a user turn.")


def read_lines(path: Path) -> list[str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: give at least one line.")
    return lines


def count_records(path: Path) -> tuple[int, int]:
    """(records, tokens) of a file; a half-written last line is cut off."""
    if not path.exists():
        return 0, 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    records = [json.loads(line) for line in whole.decode().splitlines()]
    return len(records), sum(record["n"] for record in records)


class VllmWriter:
    """Writer on vLLM's offline engine."""

    def __init__(self, options: SynthOptions) -> None:
        from vllm import LLM

        self.max_tokens = options.max_tokens
        self.llm = LLM(
            options.target,
            max_model_len=options.max_model_len,
            tensor_parallel_size=options.tensor_parallel_size,
            seed=options.seed,
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.opening, self.closing = user_turn(self.tokenizer)

    def user_turns(self, openings: Sequence[str]) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=PROMPT_TEMPERATURE, top_p=PROMPT_TOP_P, max_tokens=PROMPT_TOKENS, stop=[self.closing]
        )
        starts = [self.tokenizer(self.opening + text, add_special_tokens=False)["input_ids"] for text in openings]
        return self.texts(self.llm.generate([{"prompt_token_ids": ids} for ids in starts], params, use_tqdm=False))

    def answers(self, prompts: Sequence[str], temperature: float) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=self.max_tokens)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return self.texts(self.llm.chat(chats, params, use_tqdm=False))

    def texts(self, outputs: Sequence[Any]) -> list[Answer]:
        best = [output.outputs[0] for output in outputs]
        return [Answer(one.text, str(one.finish_reason), len(one.token_ids)) for one in best]


def user_turn(tokenizer: Any) -> tuple[str, str]:
    """(what the chat template writes before a user's text, what it writes after it)."""
    mark = "\u2042user text\u2042"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, _, after = text.partition(mark)
    return before, after.splitlines()[0] if after.strip() else "\n"
