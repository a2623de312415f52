"""Prompt lookup: what followed the last few tokens when they last occurred. No weights, any model."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_spd.config import SPDConfig
from vllm_spd.drafters.base import Drafter, Rows

__all__ = ["NgramDrafter", "NgramIndex"]


class NgramIndex:
    """Where each n-gram of one growing sequence ended, kept up to date token by token.

    Appending, cutting back and looking up cost O(longest - shortest + 1) per token, whatever the length.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """
        Args:
            shortest: smallest n, in tokens, at least 1.
            longest: largest n, in tokens.
        """
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token: int) -> None:
        """Extend the sequence by one token."""
        self._tokens.append(token)
        for ngram in self._last_ngrams():
            self._ends.setdefault(ngram, []).append(len(self._tokens))

    def cut(self, length: int) -> None:
        """Forget every token from position `length` on."""
        while len(self._tokens) > length:
            for ngram in self._last_ngrams():
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
            self._tokens.pop()

    def successor(self) -> int | None:
        """The token after the latest earlier occurrence of the longest n-gram that ends the sequence."""
        for ngram in self._last_ngrams():
            ends = self._ends[ngram]
            if len(ends) > 1:
                return self._tokens[ends[-2]]
        return None

    def _last_ngrams(self) -> list[tuple[int, ...]]:
        tokens = self._tokens
        return [tuple(tokens[-size:]) for size in self._sizes if size <= len(tokens)]


class NgramDrafter(Drafter):
    """One index per request."""

    def __init__(self, spd: SPDConfig) -> None:
        self._sizes = (spd.prompt_lookup_min, spd.prompt_lookup_max)
        self._indices: dict[str, NgramIndex] = {}

    def observe(self, rows: Sequence[Rows]) -> None:
        """Bring each request's index to the end of its last row."""
        for row in rows:
            index = self._indices.get(row.req_id)
            if index is None:
                index = self._indices[row.req_id] = NgramIndex(*self._sizes)
            index.cut(row.start)
            for position in range(len(index), row.end):
                index.append(row.token(position))

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        """Look up each request's last tokens."""
        return [self._indices[row.req_id].successor() for row in rows]

    def forget(self, req_id: str) -> None:
        """Drop the request's index."""
        self._indices.pop(req_id, None)
