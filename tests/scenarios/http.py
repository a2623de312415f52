"""What users ask the server for: bodies of HTTP requests that plain vLLM and SPD must answer alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.models import TINY_VOCAB
from tests.scenarios.scenarios import SCHEMA

__all__ = ["REFUSALS", "REQUESTS", "Request", "ask", "drop_identity", "stream"]

Body = Mapping[str, Any]
CHAT, COMPLETION = "chat/completions", "completions"
END_OF_THINKING = str(TINY_VOCAB - 1)


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: part of the test's name.
        feature: row of the compatibility table.
        body: of the request, without the model's name.
        drafts: whether there is anything to draft.
    """

    name: str
    feature: str
    body: Body
    drafts: bool = True

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.body else COMPLETION


def chat(**options: Any) -> Body:
    return {"messages": [{"role": "user", "content": "abc"}], "temperature": 1, "seed": 1, "max_tokens": 40, **options}


def complete(**options: Any) -> Body:
    return {"prompt": "one two three one two", "temperature": 0, "max_tokens": 24, **options}


FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}

REQUESTS = (
    Request("completion", "Completions", complete()),
    Request("chat", "Chat", chat()),
    Request("echo", "`echo` with logprobs", complete(echo=True, logprobs=2)),
    Request("min_p", "`min_p`", complete(temperature=1, seed=1, min_p=0.1)),
    Request("logit_bias", "`logit_bias`", complete(logit_bias={"40": 5})),
    Request("stop", "`stop`", complete(stop=["w1"], include_stop_str_in_output=True)),
    Request("choices", "Several choices", complete(n=3, temperature=1, seed=2)),
    Request("prompts", "Several prompts in one request", complete(prompt=["abc", "defg"])),
    Request("token_ids", "Prompts as token ids", complete(prompt=[7, 8, 9])),
    Request("top_logprobs", "Logprobs in chat", chat(logprobs=True, top_logprobs=3)),
    Request("schema", "`response_format`", chat(response_format=JSON_SCHEMA)),
    Request("regex", "`structured_outputs`", chat(structured_outputs={"regex": "[a-z]{3,20}"})),
    Request(
        "thinking",
        "Reasoning parser with a schema",
        chat(response_format=JSON_SCHEMA, logit_bias={END_OF_THINKING: 6}, seed=3, max_tokens=60),
    ),
    Request("required", "Tool calls, required", chat(tools=[FUNCTION], tool_choice="required", max_tokens=80)),
    Request("named", "Tool calls, named", chat(tools=[FUNCTION], tool_choice=NAMED)),
    Request("beam", "Beam search", complete(use_beam_search=True, n=2, max_tokens=6), drafts=False),
)

REFUSALS = (
    Request("length", "", complete(max_tokens=100_000)),
    Request("temperature", "", complete(temperature=-1)),
    Request("token", "", complete(logit_bias={"100000": 1})),
    Request("grammar", "", complete(structured_outputs={"grammar": "root ::= nothing"})),
    Request("regex", "", complete(structured_outputs={"regex": "("})),
    Request("model", "", complete(model="another")),
)


def ask(url: str, request: Request, model: str) -> httpx.Response:
    """The whole answer; token ids ride along."""
    body = {"model": model, "return_token_ids": True, **request.body}
    return httpx.post(f"{url}/v1/{request.path}", json=body, timeout=120)


def stream(url: str, request: Request, model: str) -> Any:
    """The streamed answer, put together again: how the text is cut into chunks depends on timing."""
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **request.body}
    whole: Any = {}
    with httpx.stream("POST", f"{url}/v1/{request.path}", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                whole = join(whole, json.loads(line.removeprefix("data: ")))
    return whole


GROWING = {"text", "content", "reasoning", "reasoning_content", "arguments"}


def join(known: Any, value: Any, key: str = "") -> Any:
    """Add a chunk: texts and lists grow, items with an index find their own, other values are the last seen."""
    if isinstance(value, Mapping):
        return {**(known or {}), **{name: join((known or {}).get(name), item, name) for name, item in value.items()}}
    if isinstance(value, list):
        return join_lists(known or [], value)
    if key in GROWING and isinstance(known, str) and isinstance(value, str):
        return known + value
    return known if value is None else value


def join_lists(known: list[Any], items: list[Any]) -> list[Any]:
    indexed = {item["index"]: item for item in known if isinstance(item, Mapping) and "index" in item}
    for item in items:
        if not isinstance(item, Mapping) or "index" not in item:
            return [*known, *items]
        indexed[item["index"]] = join(indexed.get(item["index"]), item)
    return [indexed[index] for index in sorted(indexed)] if indexed else known


IDENTITY = {"id", "created", "system_fingerprint", "prompt_routed_experts"}


def drop_identity(value: Any) -> Any:
    """The answer without what names this one answer, and with rounded logprobs: batches have other shapes."""
    if isinstance(value, Mapping):
        return {key: drop_identity(item) for key, item in value.items() if key not in IDENTITY}
    if isinstance(value, list):
        return [drop_identity(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value
