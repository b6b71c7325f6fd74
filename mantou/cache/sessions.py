"""Which checkpoint each conversation left last. Knows tree nodes; no tokens' meaning, no bytes.

A session speeds up and protects, it never decides: a checkpoint is used only where its tokens begin the new prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from mantou.cache.trie import Node
from mantou.protocols import CacheKey


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The first `num_tokens` of the path through `node`."""

    node: Node
    num_tokens: int


class Sessions:
    """The latest checkpoint of each session under each key; the sessions used least recently are forgotten first.

    `Node.holds` counts the checkpoints at or below a node.
    """

    def __init__(self, max_sessions: int = 4096) -> None:
        self.max_sessions = max_sessions
        self._latest: OrderedDict[str, dict[CacheKey, Checkpoint]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    def find(self, session: str, key: CacheKey) -> Checkpoint | None:
        """The latest checkpoint, or as much of it as is still stored."""
        checkpoint = self._latest.get(session, {}).get(key)
        if checkpoint is None:
            return None
        node, num_tokens = checkpoint.node, checkpoint.num_tokens
        while node.parent is not None and (not node.alive or node.lo >= num_tokens):
            num_tokens = min(num_tokens, node.lo)  # evicted, or cut above the checkpoint since
            node = node.parent
        return Checkpoint(node, num_tokens) if num_tokens else None

    def record(self, session: str, node: Node, num_tokens: int) -> list[Node]:
        """Moves a session to a new checkpoint. Returns nodes that no session holds any more."""
        for held in node.path():
            held.holds += 1
        freed = self._release(self._latest.setdefault(session, {}).pop(node.key, None))
        self._latest[session][node.key] = Checkpoint(node, num_tokens)
        self._latest.move_to_end(session)
        while len(self._latest) > self.max_sessions:
            freed += self.close(next(iter(self._latest)))[1]
        return freed

    def close(self, session: str) -> tuple[bool, list[Node]]:
        """Forgets a session: whether it was known, and the nodes that no session holds any more."""
        checkpoints = self._latest.pop(session, None)
        freed = [node for found in (checkpoints or {}).values() for node in self._release(found)]
        return checkpoints is not None, freed

    @staticmethod
    def _release(checkpoint: Checkpoint | None) -> list[Node]:
        """Deepest nodes first."""
        path = checkpoint.node.path() if checkpoint else []
        for node in path:
            node.holds -= 1
        return [node for node in reversed(path) if node.holds == 0 and node.alive]

    def checkpoints(self) -> Iterator[Checkpoint]:
        for by_key in self._latest.values():
            yield from by_key.values()
