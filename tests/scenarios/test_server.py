"""What a user asks for over HTTP, on the tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from benchmarks.soak import soak
from examples.server import Server
from tests.scenarios.scenarios import SCHEMA

ENGINE = ("-pp", "2", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    flags = (*ENGINE, *TOOLS, "--kv-cache-memory-bytes", "128M", "--spec-method", "spd")
    with Server(tiny, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize(
    "options", [{"extra_body": {"min_p": 0.1}}, {"logit_bias": {"40": 100}}], ids=["min_p", "logit_bias"]
)
def test_over_http(client: OpenAI, options: dict[str, Any]) -> None:
    """vLLM refuses both under other speculative methods."""
    reply = client.completions.create(model=Server.name, prompt="abc", max_tokens=8, seed=1, **options)
    assert reply.usage is not None and reply.usage.completion_tokens > 0


def test_a_named_tool_is_called(client: OpenAI) -> None:
    """Plain vLLM 0.32 gives this call the arguments `{}`, so the schema is not checked."""
    function = {"name": "look", "parameters": SCHEMA}
    reply = client.chat.completions.create(
        model=Server.name,
        messages=[{"role": "user", "content": "abc"}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "look"}},
        max_tokens=400,
        temperature=1,
        seed=1,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "look"
    assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize(
    ("clients", "seconds"), [(16, 8), pytest.param(64, 180, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_load_with_clients_that_hang_up(server: Server, clients: int, seconds: float) -> None:
    tally = asyncio.run(soak(server.url, server.name, clients, seconds))
    assert (tally.errors, tally.differing) == ([], 0)
    assert tally.finished and tally.hung_up
    deadline = time.monotonic() + 20
    while server.counter("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.counter("vllm:num_requests_running") == server.counter("vllm:kv_cache_usage_perc") == 0
