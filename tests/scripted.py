"""A drafter that knows the answers, and is wrong where it is told to be. In tests and benchmarks only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_spd.drafters.base import Drafter, Rows

__all__ = ["Script", "ScriptedDrafter", "scripted", "write_answers", "write_scripts"]


@dataclass(frozen=True)
class Script:
    """What the drafter says about one prompt. Output index 0 is the first token after the prompt.

    Attributes:
        answer: output token ids that are right.
        acceptance: probability that a draft is right, drawn from the prompt and the position.
        wrong_at: output indices where the draft is always wrong.
        silent_at: output indices without a draft.
        fault: `raise` or `range`, to misbehave in every proposal.
    """

    answer: Sequence[int]
    acceptance: float = 1.0
    wrong_at: Sequence[int] = ()
    silent_at: Sequence[int] = ()
    fault: str | None = None


class ScriptedDrafter(Drafter):
    """Follows the script of each prompt; silent for prompts without one.

    The script file holds {prompt token ids joined by spaces: a Script's fields} and may be rewritten between requests,
    so that one engine serves many cases: a request reads it when it is first seen.
    """

    def __init__(self, script: str) -> None:
        """
        Args:
            script: path of the script file.
        """
        self._path = Path(script)
        self._scripts: dict[str, Script] = {}

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        return [self._draft(row) for row in rows]

    def forget(self, req_id: str) -> None:
        self._scripts.pop(req_id, None)

    def _draft(self, row: Rows) -> int | None:
        script = self._scripts.get(row.req_id) or self._read(row)
        if script.fault == "raise":
            raise RuntimeError("scripted fault")
        if script.fault == "range":
            return 10**9
        index = row.end - len(row.prompt_token_ids)
        if index >= len(script.answer) or index in script.silent_at:
            return None
        draw = _uniform(f"{key_of(row.prompt_token_ids)}/{index}")
        right = index not in script.wrong_at and draw < script.acceptance
        return script.answer[index] if right else (script.answer[index] + 1) % 500

    def _read(self, row: Rows) -> Script:
        entry = json.loads(self._path.read_text()).get(key_of(row.prompt_token_ids), {"answer": []})
        script = self._scripts[row.req_id] = Script(**entry)
        return script


def write_scripts(path: Path, scripts: Mapping[tuple[int, ...], Script]) -> Path:
    """Write one script per prompt (token ids)."""
    path.write_text(json.dumps({key_of(prompt): asdict(script) for prompt, script in scripts.items()}))
    return path


def write_answers(path: Path, outputs: Sequence[Any], **options: Any) -> Path:
    """Record what plain decoding answered (outputs with `prompt_token_ids` and `token_ids`); options as in Script."""
    return write_scripts(path, {tuple(o.prompt_token_ids): Script(list(o.token_ids), **options) for o in outputs})


def scripted(script: Path) -> dict[str, Any]:
    """The speculative config that selects this drafter."""
    drafter = f"{ScriptedDrafter.__module__}:{ScriptedDrafter.__qualname__}"
    return {"method": "spd", "drafter": drafter, "drafter_options": {"script": str(script)}}


def key_of(prompt: Sequence[int]) -> str:
    return " ".join(map(str, prompt))


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
