"""Stop strings in a stream of text. Knows characters only: no tokens, no reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from mantou.errors import BadRequest


class Stops(Protocol):
    """Passes text through up to the first stop string."""

    matched: str | None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """Text that is certainly before any match. Once `matched` is set, the rest is gone: feed no more."""
        ...

    def flush(self) -> str:
        """The end of the text: what was withheld, up to a match that was still undecided."""
        ...


class NoStops:
    matched: str | None = None

    def feed(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return ""


class StopMatcher:
    """Aho-Corasick automaton over all stop strings: O(1) per character, whatever the strings.

    The match that starts first wins; of those with one start, the shortest. A match is decided when no stop
    string that started before it can still complete. The automaton's depth is the length of the longest end
    of the text that begins a stop string, which is what has to be withheld.

    Aho, Corasick: Efficient string matching, CACM 18(6), 1975.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises BadRequest for an empty string, which would match everywhere."""
        if not all(stop):
            raise BadRequest("Stop strings must not be empty; leave the field out instead.", param="stop")
        self.matched: str | None = None
        self._start = 0  # where the best match so far starts, counted from the start of `_held`
        self._candidate: str | None = None
        self._held = ""
        self._node = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [""]  # the longest stop string that ends at a node
        for string in stop:
            self._add(string)
        self._fallback = self._link()
        self._first = frozenset(self._next[0])

    def feed(self, text: str) -> str:
        if not self._node and self._first.isdisjoint(text):  # nothing held and nothing can begin
            return text
        end = len(self._held)
        buffer = self._held + text
        for character in text:
            end += 1
            self._step(character)
            longest = self._longest[self._node]
            if longest and (self._candidate is None or end - len(longest) < self._start):
                self._candidate, self._start = longest, end - len(longest)
            if self._candidate is not None and end - self._depth[self._node] >= self._start:
                return self._stop(buffer)
        cut = len(buffer) - self._depth[self._node]
        self._held = buffer[cut:]
        self._start -= cut
        return buffer[:cut]

    def flush(self) -> str:
        if self._candidate is not None:
            return self._stop(self._held)
        text, self._held, self._node = self._held, "", 0
        return text

    def _stop(self, buffer: str) -> str:
        self.matched, self._held, self._node = self._candidate, "", 0
        return buffer[: self._start]

    def _step(self, character: str) -> None:
        node = self._node
        while node and character not in self._next[node]:
            node = self._fallback[node]
        self._node = self._next[node].get(character, 0)

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._longest.append("")
            node = self._next[node][character]
        self._longest[node] = string

    def _link(self) -> list[int]:
        """For each node, the node of its longest proper suffix that is in the tree too; breadth first."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                other = fallback[node]
                while other and character not in self._next[other]:
                    other = fallback[other]
                fallback[child] = self._next[other].get(character, 0)
                queue.append(child)
            self._longest[node] = self._longest[node] or self._longest[fallback[node]]
        return fallback


def make_stops(stop: Sequence[str]) -> Stops:
    return StopMatcher(stop) if stop else NoStops()
