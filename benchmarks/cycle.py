"""How close the pipeline comes to its formula: tokens per second with scripted drafts, beside plain pipelining.

    python -m benchmarks.cycle [--json FILE]              every stage takes a fixed time; the model is tiny
    python -m benchmarks.cycle --real MODEL [--json FILE]  real compute with drafts that are always right

With n stages of s seconds and a share `a` of right drafts, SPD's ideal is 1 / (1 + (1 - a)(n - 1)) tokens per cycle of
s seconds. The rate is taken from the first to the last token of one request, so that the prompt does not count.
Acceptance is the measured one, from vLLM's counters. Every figure is the median over the repeats, and repeats of
SPD and plain vLLM alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.emulated import STAGE_SECONDS
from tests.engines import EngineProcess
from tests.models import tiny_llama
from tests.scripted import Script, scripted, write_scripts
from vllm_spd.control.cores import omp_threads_bind

PROMPT_LENGTH = 16
SETTLE_S = 1.5
"""The engine measured before spins for a second after its last message, on the same cores."""
GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class EmulatedRow:
    """One line of the emulated table. Times are in ms; a cycle is one step of the whole pipeline."""

    stages: int
    asked_acceptance: float
    acceptance: float
    tokens_per_s: float
    fraction: float
    cycle_ms: float
    overhead_ms: float
    plain_pp_tokens_per_s: float
    speedup: float
    load: float


@dataclass(frozen=True)
class RealRow:
    """One line of the table with real compute."""

    engine: str
    tokens_per_s: float
    spd_speedup: float
    identical: bool
    load: float


@dataclass(frozen=True)
class Run:
    """One request: its tokens, and the time from the first to the last."""

    token_ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds


def main() -> None:
    options = parse()
    kind = RealRow if options.real else EmulatedRow
    names = [field.name for field in fields(kind)]
    print_line(names, names)
    rows = []
    for row in real_rows(options) if options.real else emulated_rows(options):
        rows.append(asdict(row))
        print_line([text_of(value) for value in rows[-1].values()], names)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of stages (default: 2 4)")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.8], help="default: 1.0 0.8")
    parser.add_argument("--stage-ms", type=float, default=30.0, help="time of one stage (default: 30)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens per request (default: 160)")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--real", type=Path, metavar="MODEL", help="folder of a model to run with real compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    return parser.parse_args()


def emulated_rows(options: argparse.Namespace) -> Iterator[EmulatedRow]:
    stage = options.stage_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny")
        prompt = random_prompt()
        answer = plain_answer(model, prompt, options.tokens)
        for stages in options.stages:
            emulation = {"pipeline_parallel_size": stages, "additional_config": {STAGE_SECONDS: stage}}
            script = Path(folder) / f"script-{stages}.json"
            with (
                engine(model, speculative_config=scripted(script), **worker("EmulatedSPDWorker"), **emulation) as spd,
                engine(model, **worker("EmulatedPlainPPWorker"), **emulation) as plain,
            ):
                for acceptance in options.acceptance:
                    write_scripts(script, {tuple(prompt): Script(answer, acceptance)})
                    yield emulated_row(spd, plain, prompt, acceptance, stages, options)


def emulated_row(
    spd: EngineProcess,
    plain: EngineProcess,
    prompt: list[int],
    acceptance: float,
    stages: int,
    options: argparse.Namespace,
) -> EmulatedRow:
    stage = options.stage_ms / 1000
    before = spd.metrics()
    pairs = [
        (measure(spd, prompt, options.tokens), measure(plain, prompt, max(options.tokens // stages, 16)))
        for _ in range(options.repeats)
    ]
    measured = acceptance_between(before, spd.metrics())
    rate = statistics.median(run.tokens_per_s for run, _ in pairs)
    plain_rate = statistics.median(run.tokens_per_s for _, run in pairs)
    refill = 1 + (1 - measured) * (stages - 1)
    cycle = 1 / (rate * refill)
    return EmulatedRow(
        stages=stages,
        asked_acceptance=acceptance,
        acceptance=measured,
        tokens_per_s=rate,
        fraction=rate * stage * refill,
        cycle_ms=cycle * 1000,
        overhead_ms=(cycle - stage) * 1000,
        plain_pp_tokens_per_s=plain_rate,
        speedup=rate / plain_rate,
        load=os.getloadavg()[0],
    )


def real_rows(options: argparse.Namespace) -> Iterator[RealRow]:
    model, prompt = options.real, random_prompt()
    plain_pp = {"pipeline_parallel_size": 2, "worker_cls": "benchmarks.plain_pp.PlainPPWorker"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        with (
            engine(model) as one,
            engine(model, **plain_pp) as pipeline,
            engine(model, pipeline_parallel_size=2, speculative_config=scripted(script)) as spd,
        ):
            answer = measure(pipeline, prompt, options.tokens).token_ids
            write_scripts(script, {tuple(prompt): Script(answer)})
            engines = {"plain PP=1": one, "plain PP=2": pipeline, "SPD PP=2": spd}
            runs = [
                {name: measure(each, prompt, options.tokens) for name, each in engines.items()}
                for _ in range(options.repeats)
            ]
    rates = {name: statistics.median(run[name].tokens_per_s for run in runs) for name in engines}
    for name, rate in rates.items():
        same = all(run[name].token_ids == answer for run in runs)
        yield RealRow(name, rate, rates["SPD PP=2"] / rate, same, os.getloadavg()[0])


@contextmanager
def engine(model: Path, pipeline_parallel_size: int = 1, **options: Any) -> Iterator[EngineProcess]:
    # SPD shares the cores out by itself; plain vLLM refuses more than one rank on one NUMA node without this.
    bind = omp_threads_bind(pipeline_parallel_size, sorted(os.sched_getaffinity(0)))
    env = {"VLLM_CPU_OMP_THREADS_BIND": bind} if pipeline_parallel_size > 1 else {}
    options["env"] = {**env, **options.get("env", {})}
    process = EngineProcess(model=str(model), pipeline_parallel_size=pipeline_parallel_size, **options)
    try:
        yield process
    finally:
        process.close()


def worker(name: str) -> dict[str, str]:
    return {"worker_cls": f"benchmarks.emulated.{name}"}


def plain_answer(model: Path, prompt: list[int], tokens: int) -> tuple[int, ...]:
    with engine(model) as plain:
        return plain.generate([prompt], {**GREEDY, "max_tokens": tokens})[0].token_ids


def measure(process: EngineProcess, prompt: list[int], tokens: int) -> Run:
    time.sleep(SETTLE_S)
    token_ids, seconds = process.run(timed_in_child, prompt, {**GREEDY, "max_tokens": tokens})
    return Run(tuple(token_ids), seconds)


def timed_in_child(llm: Any, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], float]:
    """One request, and the seconds from its first to its last token."""
    from vllm import SamplingParams, TokensPrompt

    core = llm.llm_engine
    core.add_request(f"timed-{time.monotonic()}", TokensPrompt(prompt_token_ids=prompt), SamplingParams(**params))
    first, token_ids = 0.0, []
    while core.has_unfinished_requests():
        for output in core.step():
            token_ids = list(output.outputs[0].token_ids)
            first = first or time.perf_counter()
    return token_ids, time.perf_counter() - first


def acceptance_between(before: dict[str, float], after: dict[str, float]) -> float:
    drafts, accepted = (
        after[name] - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    )
    return accepted / drafts


def random_prompt() -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(3, 500) for _ in range(PROMPT_LENGTH)]


def print_line(cells: Sequence[str], names: Sequence[str]) -> None:
    print("  ".join(cell.rjust(max(len(name), 10)) for cell, name in zip(cells, names, strict=True)), flush=True)


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 10
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
