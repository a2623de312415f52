"""What a user asks for over HTTP: a plain server and one with SPD, on the tiny model, give the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.soak import KINDS, ask_once, soak
from examples.server import Server, process_group
from tests.scenarios.http import REFUSALS, REQUESTS, Request, ask, drop_identity, stream
from tests.scripted import Script, scripted, write_scripts

ENGINE = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "32M")
DRAFTS = "vllm:spec_decode_num_draft_tokens_total"
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1")


@dataclass(frozen=True)
class Servers:
    """A plain server and one with SPD, whose drafts follow a script file."""

    plain: Server
    spd: Server
    path: Path

    def expected(self, request: Request) -> Any:
        """The plain answer; six of ten drafts will be right."""
        answer = ask(self.plain.url, request, Server.name)
        assert answer.status_code == 200, answer.text
        self.script(answer.json())
        return drop_identity(answer.json())

    def load_texts(self) -> dict[int, str]:
        """The right text for each kind of request that `soak` sends."""
        answers = [asyncio.run(ask_once(self.plain.url, Server.name, kind)) for kind in range(len(KINDS))]
        self.script(*answers)
        return {kind: answer["choices"][0]["text"] for kind, answer in enumerate(answers)}

    def script(self, *answers: Any) -> None:
        scripts = {}
        for answer in answers:
            for choice in answer["choices"]:
                prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
                scripts[tuple(prompt)] = Script([*choice["token_ids"], *range(9, 13)], acceptance=0.6)
        write_scripts(self.path, scripts)


@pytest.fixture(scope="module")
def servers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    path = write_scripts(tmp_path_factory.mktemp("http") / "script.json", {})
    spd = ("-pp", "2", "--speculative-config", json.dumps(scripted(path)))
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}  # where the scripted drafter is found
    with Server(tiny, *ENGINE, *PARSERS) as plain, Server(tiny, *ENGINE, *PARSERS, *spd, env=env) as server:
        yield Servers(plain, server, path)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.name)
def test_over_http(servers: Servers, request_: Request) -> None:
    """`thinking` fails when drafts in flight do not end the reasoning for the rows behind them (tried)."""
    expected = servers.expected(request_)
    drafts = servers.spd.counter(DRAFTS)
    assert drop_identity(ask(servers.spd.url, request_, Server.name).json()) == expected
    assert servers.spd.counter(DRAFTS) > drafts or not request_.drafts


@pytest.mark.parametrize("name", ["completion", "chat", "stop", "choices", "thinking", "required", "named"])
def test_streamed(servers: Servers, name: str) -> None:
    request = next(one for one in REQUESTS if one.name == name)
    servers.expected(request)
    expected, actual = (
        drop_identity(stream(server.url, request, Server.name)) for server in (servers.plain, servers.spd)
    )
    assert actual == expected


@pytest.mark.parametrize("request_", REFUSALS, ids=lambda request: request.name)
def test_refused_alike(servers: Servers, request_: Request) -> None:
    """With vLLM's status and sentence. SPD itself has nothing to refuse per request."""
    plain, spd = (ask(server.url, request_, Server.name) for server in (servers.plain, servers.spd))
    assert plain.status_code in (400, 404)
    assert (spd.status_code, spd.json()) == (plain.status_code, plain.json())


@pytest.mark.parametrize(
    ("clients", "seconds"), [(16, 6), pytest.param(64, 180, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_load_with_clients_that_hang_up(servers: Servers, clients: int, seconds: float) -> None:
    """Every text as plain vLLM's, and nothing left running."""
    texts = servers.load_texts()
    drafts = servers.spd.counter(DRAFTS)
    tally = asyncio.run(soak(servers.spd.url, Server.name, clients, seconds, texts))
    assert (tally.errors, tally.differing) == ([], 0)
    assert tally.finished and tally.hung_up and servers.spd.counter(DRAFTS) > drafts
    deadline = time.monotonic() + 20
    while servers.spd.counter("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers.spd.counter("vllm:num_requests_running") == servers.spd.counter("vllm:kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_memory_grows_no_faster_than_without_spd(servers: Servers) -> None:
    """Plain vLLM 0.32 grows by some 100 kB per request on CPU. SPD has two workers where it has one."""
    texts = servers.load_texts()
    plain, spd = (growth_per_request(server, texts) for server in (servers.plain, servers.spd))
    assert spd < 2 * plain + 20, (plain, spd)


def growth_per_request(server: Server, texts: dict[int, str]) -> float:
    """Memory in kB per answer, under the load of 64 clients for a minute, after a first quarter of a minute."""
    asyncio.run(soak(server.url, Server.name, 64, 15, texts))
    before = memory_of(server)
    tally = asyncio.run(soak(server.url, Server.name, 64, 60, texts))
    return (memory_of(server) - before) / (tally.finished + tally.hung_up)


def memory_of(server: Server) -> int:
    """Memory that all the server's processes have to themselves, in kB."""
    assert server.process is not None
    total = 0
    for pid in process_group(server.process.pid):
        status = Path(f"/proc/{pid}/status").read_text()
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    return total


@pytest.mark.slow
def test_a_killed_worker_ends_the_server(tiny: Path) -> None:
    """As plain vLLM does: the answer is not finished, the server exits by itself, no process is left."""
    with Server(tiny, *ENGINE, "-pp", "2", "--spec-method", "spd") as server:
        assert server.process is not None
        group = server.process.pid
        workers = [pid for pid in process_group(group) if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        body = {"model": Server.name, "prompt": "abc", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(workers[-1], signal.SIGKILL)
            with contextlib.suppress(httpx.HTTPError):
                assert not any('"finish_reason":"length"' in line for line in lines)
        server.process.wait(60)
    assert process_group(group) == []
