"""Load for a running server: many streaming clients with mixed parameters, some of which hang up.

python -m benchmarks.soak http://127.0.0.1:8000 --model model --clients 64 --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

MAX_TOKENS = 48
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 0, "presence_penalty": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2, "stop": ["e"]},
    {"temperature": 0, "logprobs": 2, "frequency_penalty": 0.5},
    {"temperature": 1, "seed": 3, "extra_body": {"min_p": 0.05, "repetition_penalty": 1.2}},
    {"temperature": 0, "extra_body": {"structured_outputs": {"regex": "[a-z ]{10,40}"}}},
    {"temperature": 0, "logit_bias": {"40": 2}, "max_tokens": 9},
)
"""Each has one right text: greedy, or with a seed."""


@dataclass
class Tally:
    """What happened, and the right text of each kind of request: a given one, or the first one seen.

    A text may differ from the first one in half precision, where batches of another shape round near-ties otherwise.
    """

    texts: dict[int, str] = field(default_factory=dict)
    finished: int = 0
    hung_up: int = 0
    differing: int = 0
    errors: list[str] = field(default_factory=list)

    def note(self, kind: int, text: str) -> None:
        self.finished += 1
        self.differing += self.texts.setdefault(kind, text) != text


def request_of(model: str, kind: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"{kind} one two three four one two three",
        "max_tokens": MAX_TOKENS,
        **KINDS[kind],
    }


async def ask_once(url: str, model: str, kind: int) -> dict[str, Any]:
    """The whole answer to one kind of request, with token ids."""
    request = request_of(model, kind)
    request["extra_body"] = {"return_token_ids": True, **request.get("extra_body", {})}
    async with client_of(url) as client:
        return (await client.completions.create(**request)).model_dump()


async def ask(client: AsyncOpenAI, model: str, kind: int, tally: Tally, patience: int | None) -> None:
    """One request; hangs up after `patience` chunks."""
    stream = await client.completions.create(stream=True, **request_of(model, kind))
    text, chunks = "", 0
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        chunks += 1
        if chunks == patience:
            await stream.close()
            tally.hung_up += 1
            return
    tally.note(kind, text)


async def user(client: AsyncOpenAI, model: str, number: int, deadline: float, tally: Tally) -> None:
    draw = random.Random(number)
    while time.monotonic() < deadline:
        patience = draw.randrange(1, 20) if draw.random() < 0.2 else None
        try:
            await ask(client, model, draw.randrange(len(KINDS)), tally, patience)
        except Exception as error:
            tally.errors.append(repr(error))


async def soak(url: str, model: str, clients: int, seconds: float, texts: Mapping[int, str] | None = None) -> Tally:
    """Run all clients for `seconds`, then wait for their last requests. `texts`: the right ones by kind, if known."""
    tally, deadline = Tally(dict(texts or {})), time.monotonic() + seconds
    async with client_of(url) as client:
        await asyncio.gather(*(user(client, model, number, deadline, tally) for number in range(clients)))
    return tally


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    tally = asyncio.run(soak(args.url, args.model, args.clients, args.seconds))
    print(
        f"{tally.finished} finished, {tally.hung_up} hung up, {tally.differing} differing, {len(tally.errors)} errors"
    )
    print("\n".join(sorted(set(tally.errors))))


if __name__ == "__main__":
    main()
