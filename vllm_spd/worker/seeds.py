"""Random generators of seeded requests: the i-th output token is always drawn from the i-th state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["SeededStates"]


class SeededStates:
    """Remembers each generator's state by output index, so that rows which are void leave no trace.

    A flush or a preemption samples some positions again. Setting the state by index before sampling makes the draw
    depend on the position alone, as in plain decoding.
    """

    def __init__(self, depth: int) -> None:
        """
        Args:
            depth: how far a request may return behind the furthest position it has reached.
        """
        self._depth = depth
        self._states: dict[str, dict[int, torch.Tensor]] = {}

    def enter(self, req_id: str, generator: torch.Generator, index: int) -> None:
        """Call before output token `index` of the request is sampled."""
        states = self._states.setdefault(req_id, {})
        if index in states:
            generator.set_state(states[index])
            return
        states[index] = generator.get_state()
        states.pop(index - self._depth - 1, None)

    def forget(self, req_id: str) -> None:
        """The request is finished."""
        self._states.pop(req_id, None)

    def __len__(self) -> int:
        return len(self._states)

    def indices(self) -> Mapping[str, list[int]]:
        """Output indices that are remembered, per request."""
        return {req_id: sorted(states) for req_id, states in self._states.items()}
