"""Plain frozen values that cross package borders. Knows no arrays, no text processing, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
class Speculation:
    """What a request wants of drafts; None = as the server is set up."""

    kind: str | None = None  # ngram, model, ...; off = no drafts
    num_draft_tokens: int | None = None  # most tokens guessed at once


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Prompt positions [lo, hi) whose token ids are placeholders: what they show is what `digest` names."""

    lo: int
    hi: int
    digest: str  # of the content and of everything that changes its features, at least 128 bits


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the caller wants an answer to be, in the notation of `kind`.

    json_object: no source; json_schema: the schema as JSON text; regex: what the whole answer matches; lark: a grammar
    with a rule `start`; choice: a JSON list of texts.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark", "choice"]
    source: str = ""
    param: str = field(default="response_format", compare=False)  # the field that it came from, for errors


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """How many tokens of an answer may be reasoning, and how the model marks them."""

    num_tokens: int
    opened: bool  # the prompt ends inside a block
    open: str
    close: str
    reopens: bool = False  # a block may open anywhere, not only at the start of the answer
    before: str = ""  # what is written around the closing tag of a block that is cut short
    after: str = ""


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
    media: tuple[MediaSpan, ...] = ()
    boundaries: tuple[
        int, ...
    ] = ()  # prompt positions where messages end, and other prompts may part from this one
    # What tells a repeat of a request from another one, beside everything else here but `id` and `session`.
    seeded: bool = True  # the caller chose the seed; one that was drawn for this run does not count
    choice: int = 0  # number among the equal requests of one response
    stop: tuple[str, ...] = ()  # strings that end the text; the text side looks for them
    speculation: Speculation = Speculation()
    prediction: tuple[int, ...] = ()  # text that the answer is expected to repeat
    grammar: str = ""  # what the output must match, as the maker of constraints wrote it; "" = anything
    reasoning_budget: ReasoningBudget | None = None  # None = as long as the model likes


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A row that may guess. `tokens` are its prompt and output so far; `width` is the most tokens that it can use.

    `paid_width` is the same for those whose guesses take time; None = `width`. `slot` is where its KV is by now.
    """

    request: Request
    tokens: Sequence[int]
    width: int
    paid_width: int | None = None
    slot: int = -1

    @property
    def paid(self) -> int:
        return self.width if self.paid_width is None else min(self.paid_width, self.width)


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens. `chance`: how likely each is right if those before it are, as the one who guessed sees it.

    The first `num_sure` tokens cannot be wrong: they are taken without a look at the logits.
    """

    tokens: Sequence[int] = ()
    kind: str = ""  # who guessed
    chance: float = 0.5
    num_sure: int = 0
    free: bool = False  # guessing took no time worth counting
    chances: Any = None  # what the tokens were drawn from, on the device [T, V]; None = they were not drawn

    def __len__(self) -> int:
        return len(self.tokens)

    def judge(self, taken: Sequence[int]) -> tuple[int, int]:
        """(tokens that were right, tokens that were wrong: 0 or 1) by what the row really took."""
        compared = min(len(self.tokens), len(taken))
        for position in range(compared):
            if self.tokens[position] != taken[position]:
                return position, 1
        return compared, 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, after logits processors, before the sampler's filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class GenerationCheckpoint:
    """How far an answer had come: the tokens, and the seed that drew them."""

    seed: int  # 64 bits
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # as long as `tokens` if asked for, else empty


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """What drafts did for one request. The first three do not count copies made by fill, the last two do."""

    drafted: int = 0  # tokens guessed
    accepted: int = 0  # of them, tokens that the request's own sampler drew as well
    histogram: tuple[int, ...] = ()  # [n]: rounds of which n tokens stayed
    target_calls: int = 0  # forwards of the model that gave the answer's tokens
    tokens: int = 0  # which these are

    @staticmethod
    def sum(parts: Sequence[SpeculationUsage | None]) -> SpeculationUsage | None:
        """Several answers' as one; None if none had drafts."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        longest = max(len(part.histogram) for part in known)
        rounds = [sum(p.histogram[n] for p in known if n < len(p.histogram)) for n in range(longest)]
        return SpeculationUsage(
            sum(part.drafted for part in known),
            sum(part.accepted for part in known),
            tuple(rounds),
            sum(part.target_calls for part in known),
            sum(part.tokens for part in known),
        )


@dataclass(frozen=True, slots=True)
class FillUsage:
    """Tokens that were appended because they were certain, or copied and then verified."""

    injected: int = 0
    decode_steps: int = 0
    verify_accepted: int = 0
    verify_rejected: int = 0

    @staticmethod
    def sum(parts: Sequence[FillUsage | None]) -> FillUsage | None:
        """Several answers' as one; None if fill is off."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return FillUsage(
            sum(part.injected for part in known),
            sum(part.decode_steps for part in known),
            sum(part.verify_accepted for part in known),
            sum(part.verify_rejected for part in known),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    lane: str = "batched"
    speculation: SpeculationUsage | None = None  # None = no draft was made
    fill: FillUsage | None = None  # None = fill is off
    reasoning_tokens: int = 0  # of the completion; known to the text side


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
class TokenRow:
    """One input of an embedding model; with `second`, a pair of texts whose other one begins there."""

    tokens: tuple[int, ...]
    second: int | None = None


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
