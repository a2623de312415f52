"""A drafter that knows the answers, and is wrong where it is told to be. In tests and benchmarks only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_spd.drafters.base import Drafter, Rows

__all__ = ["ScriptedDrafter", "scripted", "write_answers"]


class ScriptedDrafter(Drafter):
    """Drafts the recorded continuation of a prompt.

    The script file holds `answers` ({prompt token ids joined by spaces: output token ids}) and may be rewritten
    between requests; it is read when a request is first seen.
    """

    def __init__(
        self,
        script: str,
        acceptance: float = 1.0,
        wrong_at: Sequence[int] = (),
        silent_at: Sequence[int] = (),
        fault: str | None = None,
    ) -> None:
        """
        Args:
            script: path of the script file.
            acceptance: probability that a draft is right, drawn from the prompt and the position.
            wrong_at: output indices where the draft is always wrong.
            silent_at: output indices without a draft.
            fault: `raise` or `range`, to misbehave in every proposal.
        """
        self._script = Path(script)
        self._acceptance = acceptance
        self._wrong_at = frozenset(wrong_at)
        self._silent_at = frozenset(silent_at)
        self._fault = fault
        self._answers: dict[str, tuple[str, list[int]]] = {}

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        if self._fault == "raise":
            raise RuntimeError("scripted fault")
        return [10**9 if self._fault == "range" else self._draft(row) for row in rows]

    def forget(self, req_id: str) -> None:
        self._answers.pop(req_id, None)

    def _draft(self, row: Rows) -> int | None:
        if row.req_id not in self._answers:
            key = " ".join(map(str, row.prompt_token_ids))
            self._answers[row.req_id] = (key, json.loads(self._script.read_text()).get(key, []))
        key, answer = self._answers[row.req_id]
        index = row.end - len(row.prompt_token_ids)
        if index >= len(answer) or index in self._silent_at:
            return None
        right = index not in self._wrong_at and _uniform(f"{key}/{index}") < self._acceptance
        return answer[index] if right else (answer[index] + 1) % 500


def write_answers(path: Path, outputs: Sequence[Any]) -> Path:
    """Record what plain decoding answered, from outputs with `prompt_token_ids` and `token_ids`."""
    answers = {" ".join(map(str, output.prompt_token_ids)): list(output.token_ids) for output in outputs}
    path.write_text(json.dumps(answers))
    return path


def scripted(script: Path, **options: Any) -> dict[str, Any]:
    """The speculative config that selects this drafter."""
    drafter = f"{ScriptedDrafter.__module__}:{ScriptedDrafter.__qualname__}"
    return {"method": "spd", "drafter": drafter, "drafter_options": {"script": str(script), **options}}


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
