"""The prefix store in host memory: one tree a CacheKey, one budget in bytes. Knows no disk, no model and no text.

Only the model thread calls it; `stats` reads plain numbers and may be called from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mantou.cache import blocks, trie
from mantou.cache.blocks import Tokens, as_tokens
from mantou.cache.prefetch import Ticket, nothing_to_wait_for
from mantou.cache.segments import Segments
from mantou.cache.sessions import Sessions
from mantou.cache.trie import OVERHEAD_BYTES, Node, Walk
from mantou.kv.pieces import Piece
from mantou.protocols import CacheKey, Hit, RowKV

Evicted = Callable[[CacheKey, Tokens, Hit], None]  # the whole path to what is about to go


@dataclass(slots=True)
class Counters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    thinned_states: int = 0
    refused: int = 0  # puts that were cut short because the budget holds no more of one prompt
    session_hits: int = 0
    session_misses: int = 0
    prefix_scans: int = 0


@dataclass(slots=True)
class Sizes:
    """What one more token, and one more state, will cost: known after the first of each key."""

    token: float = 0.0
    state: int = 0


class RamStore:
    """Keeps columns once, whoever computed them. `recurrent`: a prefix is of use only where a state was kept."""

    wants = True

    def __init__(self, max_bytes: int, *, recurrent: bool = False, max_sessions: int = 4096) -> None:
        self.recurrent = recurrent
        self.counters = Counters()
        self.on_evict: Evicted | None = None
        self._roots: dict[CacheKey, Node] = {}
        self._sizes: dict[CacheKey, Sizes] = {}
        self._sessions = Sessions(max_sessions)
        self._segments = Segments(max_bytes, self._evict, self._thin)
        self._clock = 0
        self._tip: Node | None = None  # where the put in progress goes on

    # ------------------------------------------------------------------ the seam
    def match(self, key: CacheKey, tokens: Sequence[int] | Tokens, session: str | None = None) -> Hit | None:
        """The longest stored prefix, at most len - 1 tokens. The hit's arrays are the store's own: read only."""
        tokens = as_tokens(tokens)
        found = self._find(key, tokens, session)
        hit = self._hit(found, len(tokens) - 1) if found else None
        if found is None or hit is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self._mark(found, hit.num_tokens)
        return hit

    def put(
        self, key: CacheKey, tokens: Sequence[int] | Tokens, row: RowKV, session: str | None = None
    ) -> None:
        """Copies what is missing. What does not fit the budget even when everything else goes is left out."""
        tokens = as_tokens(tokens)
        root = self._roots.setdefault(key, trie.make_root(key))
        sizes = self._sizes.setdefault(key, Sizes())
        self._clock += 1
        path, stored = self._reach(trie.walk(root, tokens), tokens)
        self._segments.touch(path, self._clock)
        stored = self._append(root, path, stored, tokens, row, sizes)
        complete = stored == len(tokens)
        if complete and self.recurrent and path:
            complete = self._put_state(path, row, sizes)
        if session is not None and path:
            self._segments.release(self._sessions.record(session, path[-1], stored))
        self._segments.touch(path, self._clock)
        self.counters.refused += not complete
        self._tip = None
        self._segments.make_room(0)  # the first piece of a key has an unknown size
        self._forget_empty_trees()

    def reach(self, key: CacheKey, tokens: Sequence[int] | Tokens) -> int:
        return self.peek(key, as_tokens(tokens))[1]

    def shrink(self, nbytes: int) -> int:
        return self._segments.shrink(nbytes)

    def prefetch(
        self,
        key: CacheKey,
        tokens: Sequence[int] | Tokens,
        session: str | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """Memory needs no time; but running rows should not push out what is about to be used."""
        root = self._roots.get(key)
        if root is not None:
            self._clock += 1
            self._segments.touch(trie.walk(root, as_tokens(tokens)).nodes, self._clock)
        return nothing_to_wait_for()

    # ------------------------------------------------------------------ what tiers and the server ask
    def peek(self, key: CacheKey, tokens: Tokens) -> tuple[Hit | None, int]:
        """What `match` would find, and how many columns there are at all. Leaves no trace: no counter, no recency."""
        root = self._roots.get(key)
        if root is None:
            return None, 0
        found = trie.walk(root, tokens)
        return self._hit(found, len(tokens) - 1), found.num_tokens

    def held(self, key: CacheKey, tokens: Tokens) -> Hit | None:
        """All columns there are for `tokens`, with the state after them if that was kept. Leaves no trace."""
        root = self._roots.get(key)
        found = trie.walk(root, tokens) if root else None
        if found is None or not found.num_tokens:
            return None
        last = found.nodes[-1]
        return Hit(found.num_tokens, _pieces(found), last.state if last.hi == found.num_tokens else None)

    def close_session(self, session: str) -> bool:
        """Ends a session's retention; what it stored stays until its turn comes. False for an unknown session."""
        known, freed = self._sessions.close(session)
        self._segments.release(freed)
        return known

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        """Nothing is queued here."""
        return {"flushed": True, "elapsed_ms": 0.0, **self.stats()}

    def close(self, timeout: float | None = None) -> None:
        pass

    def stats(self) -> dict[str, object]:
        counters = self.counters
        return {
            "prompt_cache": {
                "entries": len(self._segments.probation.nodes) + len(self._segments.protected.nodes),
                "bytes": self._segments.nbytes,
                "protected_bytes": self._segments.protected.nbytes,
                "max_bytes": self._segments.max_bytes,
                "hits": counters.hits,
                "misses": counters.misses,
                "evictions": counters.evictions,
                "thinned_states": counters.thinned_states,
                "refused": counters.refused,
                "sessions": len(self._sessions),
                "session_hits": counters.session_hits,
                "session_misses": counters.session_misses,
                "prefix_scans": counters.prefix_scans,
            }
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if trees, budget and sessions disagree. For tests and debugging."""
        nodes: list[Node] = []
        for root in self._roots.values():
            trie.check_integrity(root)
            nodes += trie.every(root)
        self._segments.check_integrity(nodes)
        holds = dict.fromkeys(nodes, 0)
        for checkpoint in self._sessions.checkpoints():
            for node in checkpoint.node.path():
                if node.alive:
                    holds[node] += 1
        assert all(node.holds == count for node, count in holds.items())

    # ------------------------------------------------------------------ match
    def _find(self, key: CacheKey, tokens: Tokens, session: str | None) -> Walk | None:
        root = self._roots.get(key)
        if session is not None:
            checkpoint = self._sessions.find(session, key)
            if root and checkpoint and trie.agrees(checkpoint.node, checkpoint.num_tokens, tokens):
                self.counters.session_hits += 1
                node = checkpoint.node
                start = node if checkpoint.num_tokens == node.hi else node.parent
                return trie.walk(start or root, tokens)
            self.counters.session_misses += 1
        self.counters.prefix_scans += 1
        return trie.walk(root, tokens) if root else None

    def _hit(self, found: Walk, limit: int) -> Hit | None:
        """What of a walk is of use: at most `limit` tokens; for recurrent models up to the deepest state."""
        if not self.recurrent:
            num_tokens = min(found.num_tokens, limit)
            return Hit(num_tokens, _pieces(found, num_tokens)) if num_tokens > 0 else None
        for node in reversed(found.whole):
            if node.state is not None and node.hi <= limit:
                return Hit(node.hi, _pieces(found, node.hi), node.state)
        return None

    def _mark(self, found: Walk, num_tokens: int) -> None:
        """Records a use. An edge counts as reused if most of it was: many prompts share their first few tokens."""
        self._clock += 1
        used = [node for node in found.nodes if node.lo < num_tokens]
        for node in used:
            node.reused |= 2 * (min(node.hi, num_tokens) - node.lo) > len(node.tokens)
        self._segments.touch(used, self._clock)
        if self.recurrent:
            self._segments.keep_state(used[-1])

    # ------------------------------------------------------------------ put
    def _reach(self, found: Walk, tokens: Tokens) -> tuple[list[Node], int]:
        """The path to what is stored of `tokens`, cut where they part from it or where a state will be kept."""
        path, stored = found.nodes, found.num_tokens
        if path and path[-1].hi > stored and (stored < len(tokens) or self.recurrent):
            upper: list[Node] = []
            lower = path.pop()
            self._segments.resize(lower, lambda: upper.append(trie.split(lower, stored)))
            self._segments.add(upper[0])
            path += upper
        return path, stored

    def _append(
        self, root: Node, path: list[Node], stored: int, tokens: Tokens, row: RowKV, sizes: Sizes
    ) -> int:
        """Adds the missing columns, block by block. Returns how many tokens are stored then."""
        while stored < len(tokens):
            hi = min(len(tokens), (stored // blocks.BLOCK + 1) * blocks.BLOCK)
            expected = int(sizes.token * (hi - stored)) + OVERHEAD_BYTES
            self._tip = path[-1] if path else root
            if not self._segments.make_room(expected, spare=self._clock):
                break
            piece = row.columns(stored, hi)
            if piece.lo != stored:
                break  # a sliding window has overwritten what the store lacks
            added = tokens[stored:hi]
            sizes.token = piece.nbytes / len(added) + added.itemsize
            node = self._tip
            if trie.can_extend(node, len(added)):
                self._segments.resize(node, lambda n=node, t=added, p=piece: trie.extend(n, t, p))
            else:
                node = trie.attach(node, added, piece)
                node.stamp = self._clock
                self._segments.add(node)
                path.append(node)
            stored = hi
        return stored

    def _put_state(self, path: list[Node], row: RowKV, sizes: Sizes) -> bool:
        """Keeps the state at the end of the path. The states on the way there are less likely to be of use now."""
        node = self._tip = path[-1]
        if node.state is None:
            if not self._segments.make_room(sizes.state, spare=self._clock):
                return False
            state = row.state()
            if state is None:  # the row gives states at some of its puts only
                return True
            assert state.num_tokens == node.hi, (state.num_tokens, node.hi)
            sizes.state = state.nbytes
            self._segments.resize(node, lambda: setattr(node, "state", state))
        for above in path[:-1]:
            self._segments.leave_behind(above)
        return True

    # ------------------------------------------------------------------ giving up
    def _evict(self, node: Node) -> None:
        self.counters.evictions += 1
        if self.on_evict is not None:
            path = node.path()
            tokens = np.concatenate([n.tokens for n in path])
            self.on_evict(node.key, tokens, Hit(node.hi, _pieces(Walk(path, node.hi)), node.state))
        self._segments.remove(node)
        trie.remove(node)

    def _thin(self, node: Node) -> None:
        """Drops a state. The edge that ended because of it is joined to the next one."""
        self.counters.thinned_states += 1
        self._segments.resize(node, lambda: setattr(node, "state", None))
        child = next(iter(node.children.values()), None)
        if child is None or child.protected != node.protected or node is self._tip:
            return
        if trie.can_absorb(node, child):
            self._segments.remove(node)
            self._segments.resize(child, lambda: trie.absorb(node, child))

    def _forget_empty_trees(self) -> None:
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]


def _pieces(found: Walk, num_tokens: int | None = None) -> tuple[Piece, ...]:
    """The columns of a walk, up to `num_tokens`."""
    end = found.num_tokens if num_tokens is None else num_tokens
    return tuple(node.piece.cut(node.lo, min(node.hi, end)) for node in found.nodes if node.lo < end)
