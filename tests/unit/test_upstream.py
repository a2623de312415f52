"""The contract with vLLM, row by row, and what the user reads when a row does not hold."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import vllm

import vllm_spd
from vllm_spd import upstream
from vllm_spd.config import SPDConfigError
from vllm_spd.upstream import SUPPORTED_VERSIONS, SYMBOLS, Symbol, missing, version_problem


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.path.partition(":")[2])
def test_the_installed_vllm_has(symbol: Symbol) -> None:
    if symbol.only == "ray":
        pytest.importorskip("ray")
    assert symbol.problem() is None
    assert symbol.why and not symbol.why.endswith(".")
    assert symbol.since in SUPPORTED_VERSIONS


def test_every_import_from_vllm_has_its_row() -> None:
    """Fails when a module imports something that no row explains (tried)."""
    rows = [symbol.path for symbol in SYMBOLS]
    for file in Path(vllm_spd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for path in (f"{node.module}:{name.name}" for name in node.names):
                    assert any(row == path or row.startswith(f"{path}.") for row in rows), f"{path} in {file.name}"


class Thing:
    def method(self, here: int) -> int:
        self.there = here
        return here


def test_a_lost_module_is_named() -> None:
    assert "vllm.no_such_module:X is missing" in str(Symbol("vllm.no_such_module:X", "").problem())


def test_a_lost_symbol_is_named() -> None:
    assert f"{__name__}:Thing.other is missing" in str(Symbol(f"{__name__}:Thing.other", "").problem())


def test_a_lost_parameter_is_named() -> None:
    symbol = Symbol(f"{__name__}:Thing.method", "", parameters=("here", "gone"))
    assert symbol.problem() == f"{__name__}:Thing.method has lost its parameter gone"


def test_a_lost_attribute_is_named() -> None:
    symbol = Symbol(f"{__name__}:Thing", "", attributes=("there", "nowhere"))
    assert symbol.problem() == f"{__name__}:Thing has lost its attribute nowhere"


def test_missing_lists_only_problems() -> None:
    good, bad = Symbol(f"{__name__}:Thing", ""), Symbol(f"{__name__}:Lost", "")
    assert len(missing([good, bad, good])) == 1 and missing([good]) == []


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1", "0.32.0+cpu"])
def test_versions_that_work(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0", "dev"])
def test_versions_that_are_refused(version: str) -> None:
    problem = version_problem(version)
    assert problem is not None and version in problem and "0.32" in problem and problem.endswith(".")


def test_the_check_passes_here() -> None:
    upstream.check()


def test_the_check_names_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "missing", lambda symbols: ["a:b is missing", "c:d has lost its parameter e"])
    with pytest.raises(SPDConfigError, match="does not fit SPD: a:b is missing; c:d has lost its parameter e"):
        upstream.check()


def test_the_check_names_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    with pytest.raises(SPDConfigError, match=r"works with vLLM 0\.32, and this is 9\.9\.9"):
        upstream.check()


def test_only_spd_lifts_vllm_s_refusal_of_min_p(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    refused: list[Any] = []
    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", lambda self, config: refused.append(config))
    upstream.lift_sampling_refusals()
    upstream.lift_sampling_refusals()
    ours, other = type("Config", (), {"model": upstream.CUSTOM_CLASS_MODEL})(), type("Config", (), {"model": "x"})()
    for config in (ours, other, None):
        SamplingParams(min_p=0.1)._validate_spec_decode(config)
    assert refused == [other, None]
