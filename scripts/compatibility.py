"""Render docs/compatibility.md from the scenario list and the JUnit report of a test run.

python -m pytest tests/scenarios --junit-xml=report.xml; python scripts/compatibility.py report.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.scenarios.scenarios import SCENARIOS  # noqa: E402

FEATURES = {
    **{f"test_{'crowded_' * (s.engine == 'crowded')}scenario/{s.name}": s.feature for s in SCENARIOS},
    "test_stops_at_every_offset/stop_token_ids": "`stop_token_ids`, `include_stop_str_in_output`",
    "test_stops_at_every_offset/stop": "`stop` strings, `include_stop_str_in_output`",
    "test_the_end_of_the_context": "Prompts up to `max_model_len`",
    "test_the_same_prompt_twice_then_a_reset": "Prefix caching, `reset_prefix_cache`",
    "test_many_turns": "Several turns",
    "test_priorities": "Priority scheduling",
    "test_aborts_leave_nothing_behind": "Aborts",
    "test_a_killed_worker_ends_the_engine": "A worker dies: the engine ends",
    "test_over_http/min_p": "`min_p` over HTTP",
    "test_over_http/logit_bias": "`logit_bias` over HTTP",
    "test_a_named_tool_is_called": "Tool calls, named",
    "test_load_with_clients_that_hang_up": "Load, clients that hang up",
}
HEAD = """# What works with SPD

All rows were compared with plain vLLM but "A worker dies" and those below it, which test SPD alone. Made by
`scripts/compatibility.py` from `tests/scenarios` and a run of it; a row says "not run" where that run has no result.

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


def verdict(test: str, found: Mapping[str, set[str]]) -> str:
    """The worst outcome of a row's cases."""
    outcomes = set().union(*(kinds for name, kinds in found.items() if matches(test, name)))
    return next((kind for kind in ("fails", "works") if kind in outcomes), "not run")


def main(report: Path) -> None:
    found = results(report)
    rows = [f"| {feature} | {verdict(test, found)} | `{test}` |" for test, feature in FEATURES.items()]
    (ROOT / "docs" / "compatibility.md").write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
