"""Render docs/compatibility.md from the scenario lists and the JUnit report of a test run.

python -m pytest tests/scenarios tests/unit/test_config.py -m "slow or not slow" --junit-xml=report.xml
python scripts/compatibility.py report.xml [report-of-a-later-run.xml ...]
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.scenarios.http import REQUESTS  # noqa: E402
from tests.scenarios.scenarios import SCENARIOS  # noqa: E402

COMPARED = {
    **{f"test_{'crowded_' * (s.engine == 'crowded')}scenario/{s.name}": s.feature for s in SCENARIOS},
    "test_stops_at_every_offset/stop_token_ids": "`stop_token_ids`, `include_stop_str_in_output`",
    "test_stops_at_every_offset/stop": "`stop` strings, `include_stop_str_in_output`",
    "test_the_end_of_the_context": "Prompts up to `max_model_len`",
    "test_the_same_prompt_twice_then_a_reset": "Prefix caching, `reset_prefix_cache`",
    "test_many_turns": "Several turns",
    "test_priorities": "Priority scheduling",
    "test_aborts_leave_nothing_behind": "Aborts beside another request",
    "test_drafters_that_read_hidden_states/pdm": "Drafter `pdm`: mixed requests, `n`, LoRA",
    "test_drafters_that_read_hidden_states/early_exit": "Drafter `early_exit`: mixed requests, `n`, LoRA",
    "test_their_drafts_are_right_after_a_prefix_from_the_cache/pdm": "Drafter `pdm`: prefixes from the cache",
    "test_two_engines_in_one_process": "Two engines in one process",
    "test_mixed_requests": "SmolLM2 in float32: mixed requests",
    **{f"test_over_http/{r.name}": f"HTTP: {r.feature}" for r in REQUESTS},
    "test_streamed": "HTTP: the same, streamed",
    "test_refused_alike": "HTTP: requests that vLLM refuses, with its status 400 or 404 and its sentence",
    "test_load_with_clients_that_hang_up": "HTTP: many clients, some of which hang up",
    "test_memory_grows_no_faster_than_without_spd": "Memory under load: grows no faster than without SPD",
}
ALONE = {
    "test_a_killed_worker_ends_the_engine": "A worker dies: the engine reports it and ends",
    "test_a_killed_worker_ends_the_server": "A worker dies: the server ends",
}
REFUSED = {
    "'async_scheduling': True": "Asynchronous scheduling",
    "'pipeline_parallel_size': 1": "One pipeline stage",
    "'data_parallel_size': 2": "Data parallelism in one server",
    "'scheduler_cls'": "A scheduler of one's own",
    "'runner_type': 'pooling'": "Pooling models",
    "'is_encoder_decoder': True": "Encoder-decoder models",
    "'is_hybrid': True": "Hybrid models (recurrent state)",
    "'kv_transfer_config'": "KV transfer between servers",
    "'decode_context_parallel_size': 2": "Context parallelism",
}
HEAD = """# What works with SPD

Made by `scripts/compatibility.py` from the lists in `tests/scenarios` and a run of them; a row says "not run" where
that run has no result. "Works" means: the same answer as plain vLLM gives. "Refused" means: one sentence at the start,
before any worker runs. There is no request that SPD refuses and plain vLLM takes. Not tested: tensor parallelism, GPUs,
and sleep mode, which vLLM's CPU build does not have.

| Feature | Result | Test |
|---|---|---|
"""


def results(report: Path) -> dict[str, set[str]]:
    """Outcomes of all cases by `function[parameters]`."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "fails" if kinds & {"failure", "error"} else "not run" if "skipped" in kinds else "works"
        found.setdefault(case.get("name", ""), set()).add(outcome)
    return found


def matches(test: str, name: str) -> bool:
    function, _, parameter = test.partition("/")
    found, _, parameters = name.rstrip("]").partition("[")
    return found == function and (not parameter or parameter in parameters.split("-"))


def verdict(found: list[set[str]]) -> str:
    """The worst outcome of a row's cases."""
    outcomes = set().union(*found)
    return next((kind for kind in ("fails", "works") if kind in outcomes), "not run")


def rows(found: Mapping[str, set[str]]) -> Iterator[tuple[str, str, str]]:
    """Feature, result and test."""
    for test, feature in (COMPARED | ALONE).items():
        yield feature, verdict([kinds for name, kinds in found.items() if matches(test, name)]), test
    for fragment, feature in REFUSED.items():
        names = [name for name in found if fragment in name and "_is_refused" in name]
        outcome = verdict([found[name] for name in names])
        function = names[0].partition("[")[0] if names else "tests/unit/test_config.py"
        yield feature, "refused" if outcome == "works" else outcome, function


def main(reports: Sequence[Path]) -> None:
    """Of a test that stands in several reports, the last one counts."""
    found = {name: kinds for report in reports for name, kinds in results(report).items()}
    lines = (f"| {feature} | {result} | `{test}` |\n" for feature, result, test in rows(found))
    (ROOT / "docs" / "compatibility.md").write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
