"""GET /metrics as text. Names are vLLM's where it has one, so that its dashboards work. Import it late: 0.15 s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mantou.api import prometheus_cache
from mantou.metrics import Histogram, ServerMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

_GAUGES = (
    ("running", "vllm:num_requests_running", "Sequences in the batch."),
    ("waiting", "vllm:num_requests_waiting", "Sequences that wait for a row."),
)
_COUNTERS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "vllm:generation_tokens", "Tokens generated."),
    ("prefix_queries", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_hits", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("drafts", "vllm:spec_decode_num_drafts", "Drafts that were checked."),
    ("drafted_tokens", "vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead."),
    ("accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Tokens guessed ahead that were right."),
)
# Engine numbers that have names of their own above.
_SHOWN = {key for key, _, _ in (*_GAUGES, *_COUNTERS)}
_LEVELS = {"rows", "max_chunks_between_tokens"}  # no sums; every other whole number of the engine only grows


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that one scrape shows, read on the event loop."""

    metrics: ServerMetrics
    engine: Mapping[str, Any]  # Engine.stats(); empty while the model loads
    model: str
    started_at: float
    cache: Mapping[str, Any] = field(default_factory=dict[str, Any])  # PrefixStore.stats()


def render(facts: Facts) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(_Scrape(facts))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._labels = [facts.model]

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        yield from self._cache()
        yield from self._http()

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, doc, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([*self._labels, key], value)
        return family

    def _histogram(self, name: str, doc: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, doc, labels=["model_name"])
        buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric(self._labels, buckets, histogram.sum)
        return family

    def _engine(self) -> Iterator[Metric]:
        engine = self._facts.engine
        for key, name, doc in _GAUGES:
            yield self._gauge(name, doc, engine.get(key, 0))
        for key, name, doc in _COUNTERS:
            yield self._counter(name, doc, engine.get(key, 0))
        places = {str(i): n for i, n in enumerate(engine.get("accepted_per_position", ()))}
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "The same by place in the draft.",
            "position",
            places,
        )
        kv = engine.get("kv", {})
        if kv.get("capacity_tokens"):
            used = kv["tokens"] / kv["capacity_tokens"]
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV capacity in use, 0 to 1.", used)
        if "bytes" in kv:
            yield self._gauge("mantou_kv_bytes", "Bytes of KV that are allocated.", kv["bytes"])
        yield from self._other_numbers(engine)

    def _cache(self) -> Iterator[Metric]:
        times = self._facts.engine.get("steps_timed", {})
        for found in (prometheus_cache.samples(self._facts.cache), prometheus_cache.step_samples(times)):
            for sample in found:
                make = self._counter if sample.grows else self._gauge
                yield make(sample.name, sample.doc, sample.value)

    def _other_numbers(self, engine: Mapping[str, Any]) -> Iterator[Metric]:
        for key, value in engine.items():
            if key in _SHOWN or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            doc = f"{key} of GET /stats (engine)."
            make = self._counter if isinstance(value, int) and key not in _LEVELS else self._gauge
            yield make(f"mantou_engine_{key}", doc, value)

    def _http(self) -> Iterator[Metric]:
        metrics = self._facts.metrics
        done = {reason: metrics.finished[reason] for reason in ("stop", "length", "abort", "error")}
        yield self._counters(
            "vllm:request_success", "Sequences that ended, by reason.", "finished_reason", done
        )
        yield self._counters(
            "mantou_requests_rejected", "Requests refused, by error code.", "code", metrics.rejected
        )
        yield self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            metrics.first_token_s,
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", metrics.inter_token_s
        )
        yield self._histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            metrics.end_to_end_s,
        )
        yield self._gauge(
            "mantou_start_time_seconds", "When the server started (Unix).", self._facts.started_at
        )
