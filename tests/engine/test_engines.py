"""The test harness itself, on plain vLLM: a wrong harness would make every comparison worthless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import PLAIN, EngineError, EnginePool

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def explode(llm: Any) -> None:
    raise ValueError("as asked")


def test_an_engine_answers_repeatably_and_is_shared(engines: EnginePool, tiny: Path) -> None:
    engine = engines.get(model=str(tiny), **PLAIN)
    first, second = engine.generate(["abc", [5, 6, 7]], GREEDY), engine.generate(["abc", [5, 6, 7]], GREEDY)
    assert first == second
    assert [len(output.token_ids) for output in first] == [8, 8]
    assert first[1].prompt_token_ids == (5, 6, 7)
    assert engines.get(model=str(tiny), **PLAIN) is engine
    assert engine.metrics()["vllm:generation_tokens"] >= 32


def test_each_prompt_may_have_its_own_parameters(engines: EnginePool, tiny: Path) -> None:
    engine = engines.get(model=str(tiny), **PLAIN)
    short, long = engine.generate(["abc", "abc"], [{**GREEDY, "max_tokens": 2, "logprobs": 1}, GREEDY])
    assert long.token_ids[:2] == short.token_ids
    assert short.logprobs is not None and set(short.token_ids) <= {token for step in short.logprobs for token in step}


def test_an_error_inside_the_engine_reaches_the_test(engines: EnginePool, tiny: Path) -> None:
    engine = engines.get(model=str(tiny), **PLAIN)
    with pytest.raises(EngineError, match="ValueError: as asked"):
        engine.run(explode)
    assert engine.generate(["abc"], GREEDY)
