"""What a drafter is: something that sees the rows of a step and predicts one token for each request that wants one."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Drafter", "Rows", "drafter_class"]


@dataclass(frozen=True)
class Rows:
    """The rows of one request in one step, on the first rank.

    Attributes:
        req_id: vLLM's id of the request.
        prompt_token_ids: its prompt.
        output_token_ids: its other tokens up to and including this step's last row, drafts included.
        start: position of the first row; everything known at or after it from earlier steps is void.
        num_rows: number of rows.
        wants_draft: whether the last row is the newest token and its successor shall be predicted.
        temperature: to draw the draft at; 0 for the best guess.
    """

    req_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    start: int
    num_rows: int
    wants_draft: bool
    temperature: float = 0.0

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    def token(self, position: int) -> int:
        """The token at a position before `end`."""
        num_prompt = len(self.prompt_token_ids)
        return (
            self.prompt_token_ids[position] if position < num_prompt else self.output_token_ids[position - num_prompt]
        )


class Drafter(ABC):
    """Lives on the first rank. Called once a step, after the stage's output has left for the next rank.

    A drafter may hold state per request. It learns of a flush by a step that starts before the last one ended.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that other ranks have sent to this drafter so far."""
        return 0

    @property
    def waited_seconds(self) -> float:
        """Time that it has waited for them so far."""
        return 0.0

    def begin(self, num_rows: int, num_finished: int) -> None:
        """A step has been dispatched and this rank's stage is about to run.

        Args:
            num_rows: rows of the step, at least 1.
            num_finished: steps whose results the scheduler has seen so far; every stage has finished them.
        """
        del num_rows, num_finished

    def observe(self, rows: Sequence[Rows]) -> None:
        """This rank's stage has run: take note of the step's rows, every request of the batch in order."""
        del rows

    @abstractmethod
    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        """Predict the token after each request's last row, in the order of `rows`.

        None where there is no idea. A token outside the target's vocabulary, such as -1, says that the computation
        failed; it is counted as a failure and not used.
        """

    def forget(self, req_id: str) -> None:
        """The request is finished or was preempted: drop its state."""
        del req_id


def drafter_class(path: str) -> type[Drafter]:
    """The class that `module:Class` names.

    Raises:
        ValueError: it cannot be imported, or is no `Drafter`.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Cannot load the drafter {path!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise ValueError(f"The drafter {path!r} is no subclass of vllm_spd.drafters.base.Drafter.")
    return found
