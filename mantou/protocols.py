"""The seams of mantou on one page. Read it to see how the axes compose; `build.py` picks what stands behind each.

Shapes use B rows, T positions a row, V vocabulary, H heads, D head dimension.
"Off" is always a null object (`NoDraft`, `NoStore`, `NoConstraint`, ...), never a branch in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mantou.data import Draft, DraftAsk, GenerationCheckpoint, Request, Sampling, TokenEvent

if TYPE_CHECKING:
    import mlx.core as mx

    from mantou.kv.lending import Seen
    from mantou.kv.pieces import Piece, State
    from mantou.kv.plan import KVPlan, LayerCodec
    from mantou.kv.records import RecordCodec
    from mantou.kv.shapes import LayerShape, Packing


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
    num_most: int = 0  # tokens that it may ever hold


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
        drafts: Sequence[Draft] = (),
    ) -> Any:
        """logits [B, T, V] -> lazy tokens int32[B, T] and log-probabilities.

        positions[b][t]: absolute position of the drawn token; history[b]: (tokens so far, draft);
        allowed: (row, position, what `Constraint.mask` gave); drafts[b]: the guess that is checked, for samplers
        that accept it by its chances instead of drawing on their own.
        """
        ...


class Constraint(Protocol):
    """What tokens a row may take next (a grammar, a forced span). Rewindable, so that drafts need no special case."""

    def mask(self) -> Any | None:
        """One bit a token for the position after all advanced tokens, 1 = allowed; None = everything allowed.

        uint8[N]: token t is bit t % 8 of byte t // 8, the lowest first. Ids that have no bit are forbidden.
        """
        ...

    def advance(self, token: int) -> None: ...
    def rewind(self, num_tokens: int) -> None: ...
    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as they are certain; () if there is a choice."""
        ...


class Constraints(Protocol):
    """Makes the constraint of a request; None means that the row never needs the host."""

    def make(self, request: Request) -> Constraint | None: ...


# ------------------------------------------------------------------ speculation
class KVLender(Protocol):
    """Rows' KV for a drafter that attends to it. Nothing of it changes."""

    lengths: list[int]  # by slot

    def look(self, group: Group, layers: Sequence[int]) -> Sequence[Seen]:
        """What the group's rows hold in these layers, as attention reads it; for one query a row, after its last token.

        Lazily, over the buffers themselves: evaluate what uses it and let go before the next forward, which would copy
        them otherwise. No forward may be in progress.
        """
        ...


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward that was committed: row i holds tokens[i, :kept[i]] at positions starts[i] and on."""

    requests: Sequence[Request | None]
    starts: Sequence[int]
    kept: Sequence[int]
    tokens: mx.array  # int32[B, T]
    hidden: (
        mx.array
    )  # [B, T, D], what the vocabulary head sees, or the layers that a head asked for side by side
    kv: KVLender


class DraftProvider(Protocol):
    """Guesses the next tokens of rows. Wrong guesses cost time, never correctness. Keeps its state by request."""

    wants_hidden: bool

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        """Most tokens that `propose` may return for the row now; 0 keeps it in the pipelined path."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        """A draft for each row, in order; all rows of a step are asked at once."""
        ...

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        """Seconds that `propose` takes for `num_rows` rows like this one."""
        ...

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        """What a row took in a step, whose draft this was."""
        ...

    def absorb(self, forwarded: Forwarded) -> None:
        """Every committed forward, prompts included, for providers that want hidden states."""
        ...

    def timed(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        """How long a decode step took, its drafts not counted. Each row fed `num_tokens`; before it, all of them held
        `num_held` together."""
        ...

    def release(self, request: Request) -> None: ...


# ------------------------------------------------------------------ KV
class KVCodec(Protocol):
    """How keys and values are stored. `unpack(pack(x))` is what attention sees, for every batch alike."""

    name: str
    raw: bool  # whether a part is the values themselves, so that a primitive may read and write it
    num_parts: int

    @property
    def affine(self) -> tuple[int, int] | None:
        """(bits, most values a group) if the parts are those of `mx.quantize`, for primitives that read them."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How the bits say the values, for a kernel that stores and reads them in its own place; None for no such."""
        ...

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        """[B, H, T, D] -> parts that share the first three axes."""
        ...

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array: ...
    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float: ...
    def check(self, head_dim: int) -> None:
        """Raises ConfigError for a head dimension that it cannot store."""
        ...


class KVScheme(Protocol):
    """Which codec each layer's keys and values take, and from which length on."""

    @property
    def name(self) -> str: ...
    def plan(self, shapes: Sequence[LayerShape]) -> KVPlan:
        """Raises ConfigError if the model's layers cannot be stored like this."""
        ...


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
    """One running row's KV, for a store to copy what it lacks.

    `since`: the row is on the way, and was offered before when it held so many tokens; None: a message, a prompt or an
    answer ends here, so that other prompts are likely to go on from it.
    """

    @property
    def since(self) -> int | None: ...
    def columns(self, lo: int, hi: int) -> Piece:
        """Positions [lo, hi); it begins later than `lo` where a sliding window has overwritten what was asked for, or
        where that is not at hand in this step."""
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

    def reach(self, key: CacheKey, tokens: Sequence[int]) -> int:
        """How many of the first tokens have stored columns, with or without a state to go on from. Leaves no trace."""
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


# ------------------------------------------------------------------ interrupted answers
class Claim(Protocol):
    """One running request's place in a `CheckpointStore`; no other request is offered what is saved in it."""

    found: GenerationCheckpoint | None  # what an interrupted run of the same request left; known once `ready`

    @property
    def ready(self) -> bool: ...
    def save(self, checkpoint: GenerationCheckpoint) -> None:
        """Queues it, in place of the one before. Never waits."""
        ...

    def release(self, *, done: bool) -> None:
        """The request has ended; `done`: nobody needs to go on from here."""
        ...


class CheckpointStore(Protocol):
    """Keeps answers in progress for a repeat of their request. The KV of them is the prefix store's."""

    every: int  # generated tokens between two checkpoints of a row; 0 = keeps nothing

    def claim(self, identity: bytes, seed: int, wake: Callable[[], None]) -> Claim:
        """Equal identities mean that one answer may stand for the other. `wake` is called from another thread."""
        ...

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        """Waits until what is queued is stored, and reports. Not on the model thread."""
        ...

    def stats(self) -> Mapping[str, object]:
        """The `generation_checkpoints` block for /stats, if any are kept. Any thread."""
        ...

    def close(self, timeout: float | None = 30.0) -> None: ...


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
    reads_blocks: bool  # whether `read_blocks` has a form for plain and affine parts
    compiles: bool  # whether steps of few tokens wait for the host, so that it pays to compile them
    packs: (
        bool | None
    )  # whether small dense layers do better packed at 8 bits; None = as the model that they help

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
        table: mx.array | None = None,
        block: int = 0,
    ) -> mx.array | None:
        """Rows [B, H, T, d] in `buffer` [slots, H, columns, d]: row b in slot first_slot + b from column start[b] on,
        modulo `ring` if that is not 0, and only its first count[b]. With `table` int32[B, blocks] there is one slot,
        and position p of row b is in column table[b, p // block] * block + p % block. None = MLX's own operations will
        do.
        """
        ...

    def read_blocks(
        self,
        q: mx.array,
        pools: tuple[Sequence[mx.array], Sequence[mx.array]],
        table: mx.array,
        block: int,
        span: int,
        *,
        bits: int,
        group: int,
        **options: Any,  # of mx.fast.scaled_dot_product_attention
    ) -> mx.array | None:
        """Attention of q [B, H, T, D] over the first `span` positions of each row, read from pools [1, Hk, columns, d]
        of keys and of values through a table as in `write_rows`; with `bits`, of the parts that `mx.quantize` makes.
        None = it has no such form, and the rows are fetched first.
        """
        ...

    def records(self, shape: LayerShape, codec: LayerCodec) -> RecordCodec | None:
        """How the device's kernels keep such a cache's keys and values and attend to them in place; None = as the codec
        does, and attention unpacks them.
        """
        ...

    def draw(
        self, logits: mx.array, params: Any, positions: mx.array | None, allowed: mx.array | None
    ) -> Sequence[mx.array] | None:
        """The last stage of a Sampler over processed logits [B, T, V]: the arrays of its result, with the same bits:
        tokens, their logits, and what was asked for of log-probabilities and alternatives.

        allowed: uint8[B, T, V / 8 rounded up], bits as in `Constraint.mask`; None = everything.

        The logits may be lazy: an implementation that needs none of them in memory never computes them.
        `params` is what the sampler prepared. None where it has no implementation of a stage that they ask for.
        """
        ...
