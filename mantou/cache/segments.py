"""The order in which stored prefixes are given up. Knows nodes and their bytes; no tokens, no keys, no copying.

Two segments, each ordered by last use. Probation holds what was stored and never asked for again; what was reused, or
belongs to an open session, is protected, up to a share of the budget. Whoever passes through the tree touches a path
from its deepest node up, so a node is always older than its parent, and the oldest node is always a leaf. Among the
few oldest leaves one goes that is cheap to compute again, or was not asked for in a long time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mantou.cache.trie import Node

# A conversation asks for each of its states once and goes on; a state that is asked for twice is where prompts part.
BRANCH_HITS = 2
PROTECTED_SHARE = 0.8  # the rest is for newcomers, or a new conversation could never become an old one
# Of so many of the oldest leaves, the one goes that is worth least.
NUM_CANDIDATES = 4
# Context at which a token's attention costs about as much as its matrix products (hidden size 1,000 to 4,000).
_EVEN_CONTEXT = 4096


def recompute_cost(node: Node) -> float:
    """Work to compute a leaf again, a byte that it takes: a token costs more the more tokens stand before it."""
    return len(node.tokens) * (1 + (node.lo + node.hi) / 2 / _EVEN_CONTEXT) / node.nbytes


class Segment:
    """Nodes from the least to the most recently used."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        self.passed: OrderedDict[Node, None] = OrderedDict()  # a deeper state exists, see leave_behind
        self.nbytes = 0


class Segments:
    """`evict` is called with a leaf, `thin` with a node whose state goes; both change the tree and these books."""

    def __init__(self, max_bytes: int, evict: Callable[[Node], None], thin: Callable[[Node], None]) -> None:
        self.max_bytes = max_bytes
        self.probation, self.protected = Segment(), Segment()
        self._evict, self._thin = evict, thin
        self._now = 0  # the newest stamp

    @property
    def nbytes(self) -> int:
        return self.probation.nbytes + self.protected.nbytes

    def __iter__(self) -> Iterator[Node]:
        yield from self.probation.nodes
        yield from self.protected.nodes

    def of(self, node: Node) -> Segment:
        return self.protected if node.protected else self.probation

    # ------------------------------------------------------------------ what passes through the tree
    def add(self, node: Node) -> None:
        """A new node, or one that a cut made: the most recent of its segment."""
        segment = self.of(node)
        segment.nodes[node] = None
        segment.nbytes += node.nbytes

    def resize(self, node: Node, change: Callable[[], object]) -> None:
        """Runs `change`, which gives the node other arrays."""
        self.of(node).nbytes -= node.nbytes
        change()
        self.of(node).nbytes += node.nbytes

    def touch(self, path: Iterable[Node], stamp: int) -> None:
        """`path` from the first edge down. Nodes that are reused or held become protected."""
        self._now = max(self._now, stamp)
        for node in reversed([*path]):
            if node.alive:
                node.stamp = stamp
                self._move(node, protected=node.reused or node.holds > 0)

    def leave_behind(self, node: Node) -> None:
        """A deeper state exists now, so this one goes first unless several prompts began with it."""
        if node.state is not None and node.state_hits < BRANCH_HITS:
            self.of(node).passed[node] = None

    def keep_state(self, node: Node) -> None:
        node.state_hits += 1
        self.of(node).passed.pop(node, None)

    def release(self, nodes: Iterable[Node]) -> None:
        """Nodes, deepest first, that no session holds any more."""
        for node in nodes:
            if node.protected and not node.reused:
                self._move(node, protected=False)

    def _move(self, node: Node, *, protected: bool) -> None:
        old, passed = self.of(node), node in self.of(node).passed
        del old.nodes[node]
        old.nbytes -= node.nbytes
        node.protected = protected
        self.add(node)
        if passed and self.of(node) is not old:
            del old.passed[node]
            self.of(node).passed[node] = None

    # ------------------------------------------------------------------ giving up
    def make_room(self, num_bytes: int, spare: int = -1) -> bool:
        """Gives up nodes until `num_bytes` more fit. False if only those stamped `spare` are left."""
        while self.nbytes + num_bytes > self.max_bytes:
            if not self._give_up(spare):
                return False
        return True

    def shrink(self, num_bytes: int) -> int:
        """Gives up at least `num_bytes` if there is so much; returns how much it was."""
        before = self.nbytes
        while before - self.nbytes < num_bytes and self._give_up(-1):
            pass
        return before - self.nbytes

    def _give_up(self, spare: int) -> bool:
        crowded = self.protected.nbytes > self.max_bytes * PROTECTED_SHARE
        if crowded and self._demote(spare):
            return True
        if self.probation.passed:
            self._drop_state(self.probation)
            return True
        old = islice((n for n in self.probation.nodes if n.stamp != spare and not n.children), NUM_CANDIDATES)
        victim = min(old, key=self._worth, default=None)
        if victim is not None:
            self._evict(victim)
            return True
        return not crowded and self._demote(spare)

    def _worth(self, node: Node) -> float:
        """Work that keeping a leaf saves, a byte and an operation since its last use. Where few prompts fill the memory
        all leaves are among the oldest, and what a running row has just stored is cheap, but not what nobody needs."""
        return recompute_cost(node) / (self._now + 1 - node.stamp)

    def _demote(self, spare: int) -> bool:
        """The oldest protected node becomes a newcomer again; states that were passed go before that."""
        if self.protected.passed:
            self._drop_state(self.protected)
            return True
        node = next(iter(self.protected.nodes), None)
        if node is None or node.stamp == spare:
            return False
        node.reused, node.state_hits = False, 0
        self._move(node, protected=False)
        return True

    def _drop_state(self, segment: Segment) -> None:
        node, _ = segment.passed.popitem(last=False)
        self._thin(node)

    def remove(self, node: Node) -> None:
        """A node leaves the books; the caller takes it out of the tree."""
        segment = self.of(node)
        del segment.nodes[node]
        segment.passed.pop(node, None)
        segment.nbytes -= node.nbytes

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError if the books do not fit the tree's nodes."""
        expected = set(nodes)
        assert set(self) == expected, "the segments hold other nodes than the tree"
        assert self.nbytes <= self.max_bytes, (self.nbytes, self.max_bytes)
        for segment, protected in ((self.probation, False), (self.protected, True)):
            assert segment.nbytes == sum(node.nbytes for node in segment.nodes)
            age = {node: i for i, node in enumerate(segment.nodes)}
            for node in segment.nodes:
                assert node.protected == protected, node.lo
                parent = node.parent
                assert parent is not None
                if parent in age:
                    assert age[parent] > age[node], "a node must be older than its parent"
                elif protected:
                    assert parent.parent is None, "what is below a protected node's parent must be reachable"
            for node in segment.passed:
                assert node in age and node.state is not None and node.state_hits < BRANCH_HITS
