"""What SPD must not change, one entry per use of vLLM. Tests and docs/compatibility.md are made from this list."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["SCENARIOS", "Case", "Scenario", "prompt_of"]

Params = Mapping[str, Any]


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """Random ordinary tokens of the tiny model."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 500) for _ in range(length))


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        prompt: token ids.
        params: keywords of SamplingParams; `structured_outputs` may be a mapping.
        adapter: number of a LoRA adapter, 0 for the base model.
    """

    prompt: tuple[int, ...]
    params: Params
    adapter: int = 0


@dataclass(frozen=True)
class Scenario:
    """Requests that run as one batch, and that plain vLLM and SPD must answer alike.

    Attributes:
        name: part of the test's name.
        feature: row of the compatibility table.
        cases: the requests.
        engine: `roomy`, or `crowded`, where KV blocks and tokens per step are scarce.
    """

    name: str
    feature: str
    cases: tuple[Case, ...]
    engine: str = "roomy"


def requests(*params: Params, length: int = 12, seed: int = 0, max_tokens: int = 20) -> tuple[Case, ...]:
    """One request per mapping, each with a prompt of its own; greedy and without EOS unless the mapping says so."""
    base = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return tuple(Case(prompt_of(length + 3 * i, 100 * seed + i), {**base, **p}) for i, p in enumerate(params))


def structured(*constraints: Params, seed: int) -> tuple[Case, ...]:
    """One request per grammar, half of them sampled."""
    draws = ({"temperature": 0}, {"temperature": 1.0, "seed": 3})
    params = [{**draws[i % 2], "ignore_eos": False, "structured_outputs": c} for i, c in enumerate(constraints)]
    return requests(*params, seed=seed, max_tokens=24)


EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9] [a-z]'
MIXED: tuple[Params, ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"repetition_penalty": 1.4},
    {"logit_bias": {40: 4.0}, "logprobs": 2},
    {"temperature": 0.9, "min_p": 0.05, "seed": 2, "max_tokens": 7},
    {"structured_outputs": {"regex": "[a-f]{4,12}"}, "ignore_eos": False},
    {"allowed_token_ids": [30, 31, 32, 33, 34, 35], "frequency_penalty": 0.7},
    {"min_tokens": 5, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
)

SCENARIOS = (
    Scenario("greedy", "Greedy decoding", requests({}, {}, {}, seed=1)),
    Scenario("temperature", "`temperature` with `seed`", requests({"temperature": 1.0, "seed": 5}, seed=2)),
    Scenario("neighbours", "Seeds beside neighbours", requests(*({"temperature": 1.0, "seed": s} for s in (5, 5, 6)))),
    Scenario("top_p", "`top_p`", requests({"temperature": 0.9, "top_p": 0.8, "seed": 6}, seed=3)),
    Scenario("top_k", "`top_k`", requests({"temperature": 1.0, "top_k": 7, "seed": 7}, seed=4)),
    Scenario("min_p", "`min_p`", requests({"temperature": 1.0, "min_p": 0.05, "seed": 8}, seed=5)),
    Scenario("presence_penalty", "`presence_penalty`", requests({"presence_penalty": 1.5}, seed=6)),
    Scenario("frequency_penalty", "`frequency_penalty`", requests({"frequency_penalty": 1.5}, seed=7)),
    Scenario("repetition_penalty", "`repetition_penalty`", requests({"repetition_penalty": 1.5}, seed=8)),
    Scenario("logit_bias", "`logit_bias`", requests({"logit_bias": {40: 4.0, 41: -9.0}}, seed=9)),
    Scenario("bad_words", "`bad_words`", requests({"bad_words": ["w20", "w30w31"]}, seed=10)),
    Scenario("min_tokens", "`min_tokens`", requests(*({**MIXED[7], "min_tokens": n} for n in range(1, 7)), seed=11)),
    Scenario("allowed_token_ids", "`allowed_token_ids`", requests({"allowed_token_ids": [40, 41, 42]}, seed=12)),
    Scenario("processor", "Custom logits processors", requests({"extra_args": {"forbid_repeats": True}}, {}, seed=13)),
    Scenario("max_tokens", "`max_tokens`", requests(*({"max_tokens": n} for n in range(1, 9)), seed=14)),
    Scenario("logprobs", "`logprobs`", requests({"logprobs": 3}, {"logprobs": 0}, seed=15)),
    Scenario("prompt_logprobs", "`prompt_logprobs`", requests({"prompt_logprobs": 2}, seed=16)),
    Scenario("n", "`n` > 1", requests({"n": 3, "temperature": 1.0, "seed": 9}, seed=17)),
    Scenario("json", "Structured output: JSON schema", structured({"json": SCHEMA}, {"json": SCHEMA}, seed=18)),
    Scenario("regex", "Structured output: regex", structured({"regex": r"[0-9]{3}-[0-9]{3,9}"}, seed=19)),
    Scenario("choice", "Structured output: choice", structured({"choice": ["yes", "yellow", "no"]}, seed=20)),
    Scenario("grammar", "Structured output: grammar", structured({"grammar": GRAMMAR}, seed=21)),
    Scenario(
        "grammars",
        "Structured output: several grammars at once",
        structured({"json": SCHEMA}, {"regex": "(ab|cd)+x"}, {"choice": ["yes", "no"]}, {"grammar": GRAMMAR}, seed=22),
    ),
    Scenario("mixed", "Eight different requests at once", requests(*MIXED, seed=23)),
    Scenario(
        "lora",
        "LoRA: two adapters and the base model at once",
        tuple(
            replace(case, adapter=index % 3)
            for index, case in enumerate(requests(*[{}, {}, {}, {"temperature": 1.0, "seed": 2}] * 2, seed=24))
        ),
    ),
    Scenario("one_token", "Prompts of one token", (Case((7,), {"temperature": 0, "max_tokens": 9}),)),
    Scenario("preemption", "Chunked prefill, preemption", requests(*[{}] * 6, length=70, max_tokens=50), "crowded"),
    Scenario(
        "seeded_preemption",
        "Preemption of seeded requests",
        requests(*[{"temperature": 1.0, "seed": 4}] * 6, length=70, max_tokens=50, seed=25),
        "crowded",
    ),
)
