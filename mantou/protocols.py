"""The seams of mantou on one page. Read it to see how the axes compose; `build.py` picks what stands behind each.

Shapes use B rows, T positions a row, V vocabulary, H heads, D head dimension.
"Off" is always a null object (`NoDraft`, `NoStore`, `NoConstraint`, ...), never a branch in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mantou.data import Request, Sampling, TokenEvent

if TYPE_CHECKING:
    import mlx.core as mx

    from mantou.kv.pieces import Piece, State


# ------------------------------------------------------------------ engine <-> world
class Mailbox(Protocol):
    """Where a step's events go. Called once a step on the model thread, so it must not block."""

    def put(self, events: Sequence[TokenEvent]) -> None: ...


# ------------------------------------------------------------------ planning (pure)
@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler may know of a sequence: lengths only."""

    id: str
    slot: int  # -1 while waiting
    num_pending: int  # tokens known but not yet in the KV: > 1 is prefill, 1 is decode
    num_left: int  # tokens that may still be generated


@dataclass(frozen=True, slots=True)
class Plan:
    admit: tuple[str, ...]  # waiting ids that join now, in order
    num_tokens: Mapping[str, int]  # running or admitted id -> known tokens it feeds this step


class Scheduler(Protocol):
    """Decides who runs and how much. Pure: same loads, same plan."""

    max_rows: int

    def plan(self, waiting: Sequence[Load], running: Sequence[Load], chunk: int) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One forward: the contiguous slots [lo, lo + len(num_tokens)), right-padded to `width` positions.

    num_tokens[i] counts the valid positions of slot lo + i; 0 marks an idle slot whose KV must not change.
    """

    lo: int
    width: int
    num_tokens: tuple[int, ...]

    @property
    def hi(self) -> int:
        return self.lo + len(self.num_tokens)


# ------------------------------------------------------------------ sampling
class Sampler(Protocol):
    """Draws the tokens of all rows and positions in one call; a draw depends on its own row and position only."""

    def wants_history(self, sampling: Sampling) -> bool:
        """Whether a row's draws read its tokens so far, so that the host must know them first."""
        ...

    def prepare(self, rows: Sequence[Sampling | None]) -> Any:
        """The rows' wishes (None = idle) as device arrays, made once per batch composition."""
        ...

    def draw(
        self,
        logits: mx.array,
        params: Any,
        positions: Sequence[Sequence[int]],
        *,
        history: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
        allowed: Sequence[tuple[int, int, Any]] = (),
    ) -> Any:
        """logits [B, T, V] -> lazy tokens int32[B, T] and log-probabilities.

        positions[b][t]: absolute position of the drawn token; history[b]: (tokens so far, draft);
        allowed: (row, position, uint8[V]) of what constraints allow.
        """
        ...


class Constraint(Protocol):
    """What tokens a row may take next (a grammar, a forced span). Rewindable, so that drafts need no special case."""

    def mask(self) -> Any | None:
        """uint8[V], 1 = allowed, for the position after all advanced tokens; None = everything allowed."""
        ...

    def advance(self, token: int) -> None: ...
    def rewind(self, num_tokens: int) -> None: ...


class Constraints(Protocol):
    """Makes the constraint of a request; None means that the row never needs the host."""

    def make(self, request: Request) -> Constraint | None: ...


# ------------------------------------------------------------------ speculation
class DraftProvider(Protocol):
    """Guesses the next tokens of a row. Wrong guesses cost time, never correctness."""

    wants_hidden: bool

    def width(self, request: Request) -> int:
        """Most tokens that `propose` may return for this request; 0 keeps the row in the pipelined path."""
        ...

    def propose(self, request: Request, tokens: Sequence[int], width: int) -> Sequence[int]: ...
    def observe(self, request: Request, num_proposed: int, num_accepted: int) -> None: ...
    def release(self, request: Request) -> None: ...


# ------------------------------------------------------------------ KV
class KVCodec(Protocol):
    """How keys and values are stored. `unpack(pack(x))` is what attention sees, for every batch alike."""

    name: str
    raw: bool  # whether a part is the values themselves, so that a primitive may read and write it

    @property
    def affine(self) -> tuple[int, int] | None:
        """(bits, most values a group) if the parts are those of `mx.quantize`, for primitives that read them."""
        ...

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        """[B, H, T, D] -> parts that share the first three axes."""
        ...

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array: ...
    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float: ...


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything besides tokens that the stored numbers depend on. Nothing may be served under another key."""

    model: str
    adapters: tuple[str, ...]
    codec: str
    provider: str


@dataclass(frozen=True, slots=True)
class Hit:
    """KV that need not be computed: contiguous pieces from 0 to `num_tokens`, and the recurrent state there."""

    num_tokens: int
    pieces: tuple[Piece, ...]
    state: State | None = None


class RowKV(Protocol):
    """One running row's KV, for a store to copy what it lacks."""

    def columns(self, lo: int, hi: int) -> Piece:
        """Positions [lo, hi); it begins later than `lo` where a sliding window has overwritten what was asked for."""
        ...

    def state(self) -> State | None:
        """The recurrent state after all tokens that were put; None for models without recurrent layers."""
        ...


class Ticket(Protocol):
    """A prompt on its way from a slow tier, while its request waits."""

    @property
    def ready(self) -> bool:
        """Whether waiting longer brings nothing."""
        ...

    def close(self) -> None:
        """The request has what it needs, or is gone."""
        ...


class PrefixStore(Protocol):
    """Finds KV that was computed before. A composite of stores is itself a store."""

    @property
    def wants(self) -> bool:
        """Whether it keeps anything at all."""
        ...

    def match(self, key: CacheKey, tokens: Sequence[int], session: str | None = None) -> Hit | None:
        """The longest stored prefix of `tokens`, at most len - 1 of them, so that one is left to run."""
        ...

    def put(self, key: CacheKey, tokens: Sequence[int], row: RowKV, session: str | None = None) -> None:
        """Keeps the KV of `tokens`, copying from `row` only what is not there yet."""
        ...

    def prefetch(
        self, key: CacheKey, tokens: Sequence[int], session: str | None, wake: Callable[[], None]
    ) -> Ticket:
        """Starts to bring a prompt's KV from slow tiers. Never waits; `wake` is called from another thread."""
        ...

    def shrink(self, nbytes: int) -> int:
        """Frees at least `nbytes` of memory if it holds so much; returns what it freed."""
        ...

    def close_session(self, session: str) -> bool:
        """Ends a session's retention preference; False for an unknown one."""
        ...

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        """Waits until what is queued for slow tiers is stored, and reports. Not on the model thread."""
        ...

    def stats(self) -> Mapping[str, object]:
        """`prompt_cache` and `ssd_cache` blocks for /stats, for the tiers that exist. Any thread."""
        ...

    def close(self, timeout: float | None = 30.0) -> None:
        """Stores what is queued and lets go of the disk. Not on the model thread."""
        ...


# ------------------------------------------------------------------ adapters
class Adapters(Protocol):
    """Per-row weight changes. `bind` sets the adapters of each row of the next forward."""

    def bind(self, rows: Sequence[tuple[str, ...]]) -> None: ...
    def revision(self, names: Sequence[str]) -> tuple[str, ...]:
        """Content revisions, for the CacheKey. Raises BadRequest for an unknown name."""
        ...


# ------------------------------------------------------------------ device
class DeviceOps(Protocol):
    """One device's own implementation of a model's building blocks; plain MLX is the oracle and the fallback."""

    name: str

    def install(self, model: Any) -> Sequence[str]:
        """Replaces what it can in the loaded graph, in place. Returns notes for the ready card."""
        ...

    def write_rows(
        self,
        buffer: mx.array,
        rows: mx.array,
        start: mx.array,
        count: mx.array | None,
        first_slot: int,
        ring: int,
    ) -> mx.array | None:
        """Rows [B, H, T, d] in `buffer` [slots, H, columns, d]: row b in slot first_slot + b from column start[b] on,
        modulo `ring` if that is not 0, and only its first count[b]. None = MLX's own operations will do.
        """
        ...

    def draw(self, logits: mx.array, params: Any, positions: mx.array | None) -> Sequence[mx.array] | None:
        """The last stage of a Sampler over processed logits [B, T, V]: the arrays of its result, with the same bits.

        `params` is what the sampler prepared. None where it has no implementation of a stage that they ask for.
        """
        ...
