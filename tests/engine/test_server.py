"""The OpenAI-compatible server with SPD, through the `vllm` command and the `openai` client, as a user meets it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from examples.server import Server, ServerError, process_group

ENGINE = ("-pp", "2", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "128M")
QUESTIONS = (
    "What is the capital of France?",
    "Say the words one two three four, then say the words one two three four again.",
    "Explain in two sentences why the sky is blue.",
)
PROMPTS = ("The capital of France is", "one two three four one two three four one two", "x = [1, 2, 3, 1, 2, 3,")


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str | None
    completion_tokens: int


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with Server(smollm2, *ENGINE, "--speculative-config", json.dumps({"method": "spd", "drafter": "ngram"})) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(client: OpenAI, question: str, **options: Any) -> Answer:
    messages = [{"role": "user", "content": question}]
    return answer(client.chat.completions.create(model=Server.name, messages=messages, **defaults(options)))


def complete(client: OpenAI, prompt: str, **options: Any) -> Answer:
    """Of exactly `max_tokens` tokens unless a stop string ends it."""
    endless = {"ignore_eos": True}
    return answer(client.completions.create(model=Server.name, prompt=prompt, extra_body=endless, **defaults(options)))


def defaults(options: dict[str, Any]) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if options.get("stream") else {}
    return {"temperature": 0, "max_tokens": 48, **usage, **options}


def answer(reply: Any) -> Answer:
    """One shape for chat and completion, whole and streamed."""
    if hasattr(reply, "choices"):
        (choice,) = reply.choices
        return Answer(text_of(choice), choice.finish_reason, reply.usage.completion_tokens)
    text, reason, tokens = "", None, 0
    for chunk in reply:
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            text += text_of(choice)
            reason = choice.finish_reason or reason
    return Answer(text, reason, tokens)


def text_of(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text
    return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_streamed_chat_equals_the_whole_one(client: OpenAI, question: str) -> None:
    whole = chat(client, question)
    assert whole.text and whole.completion_tokens > 0
    assert chat(client, question, stream=True) == whole


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_streamed_completion_equals_the_whole_one(client: OpenAI, prompt: str) -> None:
    whole = complete(client, prompt)
    assert whole.completion_tokens == 48 and whole.finish_reason == "length"
    assert complete(client, prompt, stream=True) == whole


def test_the_answer_is_sensible(client: OpenAI) -> None:
    assert "Paris" in chat(client, QUESTIONS[0]).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(client: OpenAI, stream: bool) -> None:
    text = complete(client, PROMPTS[1]).text
    stop = text[len(text) // 2 :][:3]
    stopped = complete(client, PROMPTS[1], stop=[stop], stream=stream)
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_tokens_is_exact(client: OpenAI, limit: int) -> None:
    short = complete(client, PROMPTS[1], max_tokens=limit)
    assert (short.completion_tokens, short.finish_reason) == (limit, "length")
    assert complete(client, PROMPTS[1]).text.startswith(short.text)


def test_several_choices_and_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(
        model=Server.name, prompt=PROMPTS[0], n=2, temperature=1, seed=7, max_tokens=8, logprobs=1
    )
    assert len(reply.choices) == 2
    for choice in reply.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 8


def test_a_seed_repeats_its_text(client: OpenAI) -> None:
    first, second = (complete(client, PROMPTS[0], temperature=1, seed=11) for _ in range(2))
    assert first == second


def test_users_at_the_same_time_all_get_whole_answers(client: OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: complete(client, PROMPTS[index % 3], stream=index % 2 == 0), range(8)))
    assert [one.completion_tokens for one in answers] == [48] * 8


def test_a_client_that_hangs_up_frees_its_place(client: OpenAI, server: Server) -> None:
    stream = client.completions.create(
        model=Server.name,
        prompt=PROMPTS[1],
        temperature=0,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while server.counter("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.counter("vllm:num_requests_running") == 0
    assert complete(client, PROMPTS[0]).completion_tokens == 48


def test_a_bad_request_does_not_harm_the_server(client: OpenAI) -> None:
    with pytest.raises(BadRequestError):
        complete(client, PROMPTS[0], max_tokens=100_000)
    assert complete(client, PROMPTS[0]).completion_tokens == 48


def test_drafts_are_counted(client: OpenAI, server: Server) -> None:
    complete(client, PROMPTS[1])
    drafted = server.counter("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.counter("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted


def test_a_clean_shutdown_leaves_no_process(tiny: Path) -> None:
    """Also the shortest way to ask for SPD: `--spec-method spd`."""
    server = Server(tiny, *ENGINE, "--spec-method", "spd")
    with server:
        assert server.process is not None
        group = server.process.pid
        assert len(process_group(group)) > 3  # front end, engine core, two workers
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert complete(client, "abc", max_tokens=8).completion_tokens > 0
        status = server.stop()
    assert process_group(group) == []
    assert status == 0
    assert server.killed == []


def test_a_bad_configuration_is_refused_before_any_worker_starts(tiny: Path) -> None:
    """The other refusals are tested where they are made."""
    with pytest.raises(ServerError, match="ended with status 1") as refusal:
        Server(tiny, "--enforce-eager", "--speculative-config", '{"method": "spd"}').start()
    assert refusal.value.log.splitlines()[-1].endswith("add `-pp 2`.")
    assert "EngineCore" not in refusal.value.log
