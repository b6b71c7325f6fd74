"""The tree of stored prefixes of one CacheKey. Knows tokens, KV pieces and states; no budget and no order of eviction.

    root -- [0,256) -- [256,300) -- [300,512) -- ...
                          |    \\-- [300,340)             an edge ends where prompts part, where a state was kept,
                          state after 300 tokens          and at every multiple of BLOCK

Edges have any length up to a block, so each stored column exists once, and a match is exact to the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mantou.cache import blocks
from mantou.cache.blocks import Tokens, common_length, join
from mantou.kv.pieces import Piece, State
from mantou.protocols import CacheKey

# Edges are lengthened up to so many tokens. Lengthening copies, and in a model's step a copy is a pause.
MAX_EXTENDED = 64
OVERHEAD_BYTES = 1024  # what a node costs beside its arrays, so that a budget bounds their number as well


@dataclass(slots=True, eq=False)
class Node:
    """One edge and its end: positions [lo, hi), their columns, and the recurrent state after them if one was kept."""

    key: CacheKey
    lo: int
    tokens: Tokens
    piece: Piece
    parent: Node | None = None
    state: State | None = None
    children: dict[int, Node] = field(default_factory=dict)  # first token -> edge
    # What the owner of the budget keeps here
    stamp: int = 0  # the operation that last passed through
    reused: bool = False
    state_hits: int = 0
    protected: bool = False
    holds: int = 0  # sessions whose latest checkpoint lies here or deeper

    @property
    def hi(self) -> int:
        return self.lo + len(self.tokens)

    @property
    def alive(self) -> bool:
        return self.parent is not None and self.parent.children.get(int(self.tokens[0])) is self

    @property
    def nbytes(self) -> int:
        state = self.state.nbytes if self.state else 0
        return self.piece.nbytes + state + self.tokens.nbytes + OVERHEAD_BYTES

    def path(self) -> list[Node]:
        """From the first edge to this one; the root is not part of it."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


def make_root(key: CacheKey) -> Node:
    return Node(key, 0, np.zeros(0, np.int32), Piece(0, 0, ()))


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a prompt is stored: `nodes` from the first edge on; all but the last are matched to their end."""

    nodes: list[Node]
    num_tokens: int

    @property
    def whole(self) -> list[Node]:
        """The nodes that are matched to their end."""
        if self.nodes and self.nodes[-1].hi > self.num_tokens:
            return self.nodes[:-1]
        return self.nodes


def walk(start: Node, tokens: Tokens) -> Walk:
    """The longest stored prefix of `tokens`; everything up to the end of `start` is known to agree."""
    nodes, node, position = start.path(), start, start.hi
    while position < len(tokens):
        child = node.children.get(int(tokens[position]))
        if child is None:
            break
        shared = common_length(child.tokens, tokens[position : position + blocks.BLOCK])
        nodes.append(child)
        position += shared
        if shared < len(child.tokens):
            break
        node = child
    return Walk(nodes, position)


def agrees(node: Node, num_tokens: int, tokens: Tokens) -> bool:
    """Whether the first `num_tokens` of the path through `node`, which reaches so far, are those of `tokens`."""
    return num_tokens <= len(tokens) and all(
        np.array_equal(n.tokens[: num_tokens - n.lo], tokens[n.lo : min(n.hi, num_tokens)])
        for n in node.path()
    )


def attach(parent: Node, tokens: Tokens, piece: Piece) -> Node:
    node = Node(parent.key, parent.hi, tokens.copy(), piece, parent)
    parent.children[int(tokens[0])] = node
    return node


def split(node: Node, position: int) -> Node:
    """Cuts an edge in two and returns the new upper one; `node` stays the lower one, with its state and children."""
    assert node.parent is not None and node.lo < position < node.hi
    size = position - node.lo
    upper = attach(node.parent, node.tokens[:size], node.piece.cut(node.lo, position, copy=True))
    upper.stamp, upper.reused, upper.protected, upper.holds = (
        node.stamp,
        node.reused,
        node.protected,
        node.holds,
    )
    node.piece = node.piece.cut(position, node.hi, copy=True)
    node.lo, node.tokens, node.parent = position, node.tokens[size:].copy(), upper
    upper.children[int(node.tokens[0])] = node
    return upper


def can_extend(node: Node, num_tokens: int) -> bool:
    """Whether a prompt that is longer by so much may lengthen this edge instead of adding one behind it."""
    open_end = not node.children and node.state is None and node.hi % blocks.BLOCK != 0
    return open_end and node.parent is not None and len(node.tokens) + num_tokens <= MAX_EXTENDED


def extend(node: Node, tokens: Tokens, piece: Piece) -> None:
    node.piece = join([node.piece, piece])
    node.tokens = np.concatenate([node.tokens, tokens])


def can_absorb(node: Node, child: Node) -> bool:
    """Whether nothing ends where `node` ends but the edge itself."""
    in_one_block = node.lo // blocks.BLOCK == (child.hi - 1) // blocks.BLOCK
    return in_one_block and len(node.children) == 1 and node.state is None


def absorb(node: Node, child: Node) -> None:
    """Joins an edge to its only child, which becomes the longer edge; `node` leaves the tree."""
    assert node.parent is not None and can_absorb(node, child)
    child.piece = join([node.piece, child.piece])
    child.tokens = np.concatenate([node.tokens, child.tokens])
    child.lo, child.parent = node.lo, node.parent
    node.parent.children[int(node.tokens[0])] = child
    node.children, node.piece = {}, Piece(node.lo, node.lo, ())


def remove(node: Node) -> None:
    """Drops a leaf and what it holds. Its `parent` stays readable, for those who still point at it."""
    assert node.parent is not None and not node.children
    del node.parent.children[int(node.tokens[0])]
    node.piece, node.state = Piece(node.lo, node.lo, ()), None


def every(root: Node) -> Iterator[Node]:
    """All nodes but the root, parents first."""
    open_nodes = list(root.children.values())
    while open_nodes:
        node = open_nodes.pop()
        yield node
        open_nodes.extend(node.children.values())


def check_integrity(root: Node) -> None:
    """Raises AssertionError if a link, an edge or a piece does not fit its place."""
    for node in (root, *every(root)):
        for first, child in node.children.items():
            assert child.parent is node and child.alive and child.key == root.key, child
            assert child.lo == node.hi and int(child.tokens[0]) == first, child
        if node is root:
            continue
        assert len(node.tokens) > 0 and node.lo // blocks.BLOCK == (node.hi - 1) // blocks.BLOCK, (
            node.lo,
            node.hi,
        )
        assert (node.piece.lo, node.piece.hi) == (node.lo, node.hi), (node.piece.lo, node.piece.hi)
        assert all(s.data.shape[-2] == len(node.tokens) for s in node.piece.stacks), node.lo
        assert node.state is None or node.state.num_tokens == node.hi, (node.state, node.hi)
