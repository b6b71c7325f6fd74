"""Plain frozen values that cross package borders. Knows no arrays, no text processing, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class ToneCurve:
    """HLG-style curve on log-probabilities that replaces plain temperature (all values in nats)."""

    width: float = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    pivot_offset: float = 6.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence picks its tokens. Zero means off unless a line says otherwise."""

    temperature: float = 0.0  # 0 = greedy
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    xtc_exempt: tuple[int, ...] = ()  # tokens XTC never removes: EOS and newline ids
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20  # 0 = the whole history, here and below
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    tone_curve: ToneCurve | None = None
    seed: int = 0  # any integer; its low 64 bits key the noise together with the absolute position
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence as the engine sees it: token ids in, token ids out."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None  # None = until EOS or the end of the context
    eos: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    session: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, after logits processors, before the sampler's filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    lane: str = "batched"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step produced for one request. The last event of a request carries `finish` and `usage`.

    The EOS token that ends a sequence is counted in `usage` but never appears in `tokens`.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # as long as `tokens` if asked for, else empty
    finish: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text, as on the wire


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn, flattened to text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation: `text` tokenises to `tokens`; `boundaries` are token counts at message ends."""

    tokens: tuple[int, ...]
    text: str
    boundaries: tuple[int, ...] = ()
    reasoning_open: bool = False  # the template left a reasoning block open, so the answer starts inside it


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A part of a tool call that became certain. The first of a call carries `id` and `name`."""

    index: int  # which call of this answer, from 0
    id: str = ""
    name: str = ""
    arguments: str = ""  # a further piece of the arguments' JSON text


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Text that became certain since the last event of the same request. The last one carries `finish`."""

    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Literal["stop", "length", "tool_calls", "cancelled", "error"] | None = None
    stop_sequence: str | None = None  # the stop string that ended the text, if one did
    error: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model says of itself; the api shows it, the engine bounds requests by it."""

    id: str
    model_type: str
    context_length: int
    vocab_size: int
    weights_bytes: int
    dtype: str
    device: str
    kv_scheme: str
    num_layers: Mapping[str, int] = field(default_factory=dict)  # layout -> count
    reasoning: bool = False
    vision: bool = False
    notes: tuple[str, ...] = ()  # what a user must know: fallbacks in force, limits of this family
    extra: Mapping[str, Any] = field(default_factory=dict)
