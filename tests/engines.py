"""Offline engines for tests: each lives in a child process, answers over a pipe, and is shared by many tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from examples.server import kill_group, process_group

__all__ = [
    "DEFAULTS",
    "INSIDE",
    "PLAIN",
    "SHARED",
    "EngineError",
    "EnginePool",
    "EngineProcess",
    "Output",
    "chats_in_child",
]

Prompt = str | Sequence[int]
Params = Mapping[str, Any]

DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 * 2**20,
    "disable_log_stats": False,  # else get_metrics() is empty
    "seed": 0,
}


SHARED: dict[str, Any] = {
    "dtype": "float32",
    "logits_processors": ["tests.scenarios.processors:ForbidRepeats"],
    "enable_lora": True,
    "max_loras": 3,  # one more than used: on CPU vLLM applies the last slot to rows of the base model
    "max_lora_rank": 8,
}
"""Options of the engines that most tests share: exact, and with what some scenario needs switched on."""
PLAIN: dict[str, Any] = {**SHARED, "worker_cls": "tests.quiet.QuietWorker"}
"""The engine without SPD that the others are compared with."""
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of engines whose scheduler and workers can be looked into; it also saves the start of a process."""


class EngineError(RuntimeError):
    """The child died, hung, or answered with an error."""


@dataclass(frozen=True)
class Output:
    """First completion of one prompt. `logprobs` has one {token id: logprob} per token, if they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[dict[int, float], ...] | None


class EngineProcess:
    """One `vllm.LLM(**kwargs)` in a child process that leads its own process group.

    Keywords are those of `LLM`, on top of DEFAULTS; `env` is added to the child's environment.
    """

    def __init__(self, *, env: Mapping[str, str] | None = None, start_timeout: float = 300, **kwargs: Any) -> None:
        self.log = Path(tempfile.mkstemp(prefix="engine-", suffix=".log")[1])
        self.leftovers: list[int] = []  # processes that close() had to kill
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, {**DEFAULTS, **kwargs}, dict(env or {}), str(self.log))
        self.process = context.Process(target=child_main, args=arguments)
        self.process.start()
        theirs.close()
        self.receive(start_timeout)

    def generate(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None = None, timeout: float = 300
    ) -> list[Output]:
        """All prompts as one batch. `params`: keywords of SamplingParams, for all prompts or one mapping for each."""
        return self.run(generate_in_child, list(prompts), params or {}, timeout=timeout)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, summed over labels."""
        return self.run(metrics_in_child)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> Any:
        """`function(llm, *args)` inside the child; the function must sit at a module's top level."""
        try:
            self.pipe.send((function, args))
        except (BrokenPipeError, OSError):
            raise self.failure("died") from None
        return self.receive(timeout)

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def receive(self, timeout: float) -> Any:
        try:
            if not self.pipe.poll(timeout):
                raise self.failure(f"gave no answer in {timeout:.0f} s")
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self.failure("died") from None
        if kind == "error":
            raise EngineError(value)
        return value

    def failure(self, what: str) -> EngineError:
        tail = self.tail()
        self.close(grace=0)
        return EngineError(f"The engine {what}. The end of its log:\n{tail}")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, grace: float = 40) -> None:
        """Ask it to shut down, then kill what is left of its group."""
        pid = self.process.pid
        if pid is None or not self.log.exists():
            return
        self.pipe.close()
        self.process.join(grace)
        wait_until(lambda: not process_group(pid), min(grace, 5))
        self.leftovers = kill_group(pid)
        self.process.kill()  # in case it had no group of its own yet
        self.process.join()
        self.log.unlink(missing_ok=True)


class EnginePool:
    """Engines by their keywords; the one used longest ago is closed when a new one would be one too many."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.alive: OrderedDict[str, EngineProcess] = OrderedDict()

    def get(self, **kwargs: Any) -> EngineProcess:
        key = json.dumps(kwargs, sort_keys=True, default=str)
        engine = self.alive.pop(key, None)
        if engine is None or not engine.is_alive():
            self.make_room()
            engine = EngineProcess(**kwargs)
        self.alive[key] = engine
        return engine

    def make_room(self) -> None:
        while len(self.alive) >= self.limit:
            self.alive.popitem(last=False)[1].close()

    def close(self) -> None:
        while self.alive:
            self.alive.popitem()[1].close()


def child_main(pipe: Connection, kwargs: dict[str, Any], env: dict[str, str], log: str) -> None:
    os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    redirect_output(log)
    os.environ.update(env)
    try:
        from vllm import LLM

        llm = LLM(**kwargs)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ok", None))
    answer_until_closed(pipe, llm)
    llm.llm_engine.engine_core.shutdown()


def die_with_parent() -> None:
    """A test run that is killed closes nothing, and an engine left behind would slow down the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)


def answer_until_closed(pipe: Connection, llm: Any) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("ok", function(llm, *args))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)


def redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def generate_in_child(llm: Any, prompts: list[Prompt], params: Params | Sequence[Params]) -> list[Output]:
    from vllm import SamplingParams, TokensPrompt

    many = [params] * len(prompts) if isinstance(params, Mapping) else params
    inputs = [prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    results = llm.generate(inputs, [SamplingParams(**one) for one in many], use_tqdm=False)
    return [as_output(result) for result in results]


def chats_in_child(llm: Any, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of one chat per question, ready for the model's answer."""
    tokenizer = llm.get_tokenizer()
    chats = ([{"role": "user", "content": question}] for question in questions)
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def as_output(result: Any) -> Output:
    first = result.outputs[0]
    logprobs = None
    if first.logprobs is not None:
        logprobs = tuple({token: entry.logprob for token, entry in step.items()} for step in first.logprobs)
    return Output(
        text=first.text,
        token_ids=tuple(first.token_ids),
        prompt_token_ids=tuple(result.prompt_token_ids),
        finish_reason=first.finish_reason,
        stop_reason=first.stop_reason,
        logprobs=logprobs,
    )


def metrics_in_child(llm: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None:
            totals[metric.name] = totals.get(metric.name, 0.0) + value
    return totals


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
