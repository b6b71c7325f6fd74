"""The prompt cache's part of GET /metrics: which number of GET /stats has which name. Knows no exposition format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Sample(NamedTuple):
    name: str  # without _total
    doc: str
    value: float
    grows: bool  # a counter, else a gauge


# block of /stats -> number in it -> (metric, what it says)
_COUNTERS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "prompt_cache": {
        "hits": ("mantou_prompt_cache_hits", "Lookups that found a beginning of the prompt in memory."),
        "misses": ("mantou_prompt_cache_misses", "Lookups that found nothing in memory."),
        "evictions": ("mantou_prompt_cache_evictions", "Pieces of prompts that memory gave up."),
        "thinned_states": (
            "mantou_prompt_cache_thinned_states",
            "Recurrent states given up before their prompts.",
        ),
        "refused": (
            "mantou_prompt_cache_refused",
            "Prompts stored in part only: the budget holds no more of one.",
        ),
        "session_hits": (
            "mantou_prompt_cache_session_hits",
            "Lookups that went on from their session's last turn.",
        ),
        "session_misses": (
            "mantou_prompt_cache_session_misses",
            "Lookups of a session that is new, or was edited.",
        ),
        "prefix_scans": ("mantou_prompt_cache_prefix_scans", "Lookups from the beginning of the prompt."),
    },
    "ssd_cache": {
        "restores": ("mantou_ssd_cache_restores", "Prompts that went on from the SSD."),
        "spills": ("mantou_ssd_cache_spills", "Files written."),
        "demotions": ("mantou_ssd_cache_demotions", "Files queued when memory gave up the only copy."),
        "evictions": ("mantou_ssd_cache_evictions", "Files removed to make room."),
        "skipped_states": (
            "mantou_ssd_cache_skipped_states",
            "Recurrent states on the way that were not worth their space.",
        ),
        "prefetches": ("mantou_ssd_cache_prefetches", "Prompts read while their request waited."),
        "skipped_prefetches": (
            "mantou_ssd_cache_skipped_prefetches",
            "Not read: too much waits in memory already.",
        ),
        "dropped_spills": (
            "mantou_ssd_cache_dropped_spills",
            "Not written: the queue was full, or read only.",
        ),
        "failed_spills": ("mantou_ssd_cache_failed_spills", "Not written: the file system refused."),
        "corrupt_files": ("mantou_ssd_cache_corrupt_files", "Files that were not what they should be."),
    },
    "generation_checkpoints": {
        "saved": ("mantou_generation_checkpoints_saved", "Running answers written to the SSD."),
        "resumed": ("mantou_generation_checkpoints_resumed", "Answers that went on from there."),
        "replayed_tokens": ("mantou_generation_checkpoints_replayed_tokens", "Tokens sent again, not made."),
        "removed": ("mantou_generation_checkpoints_removed", "Of answers that were completed."),
        "evictions": ("mantou_generation_checkpoints_evictions", "Removed to make room."),
        "dropped": ("mantou_generation_checkpoints_dropped", "Not written: the queue was full."),
        "failed": ("mantou_generation_checkpoints_failed", "Not written: the file system refused."),
        "corrupt_files": (
            "mantou_generation_checkpoints_corrupt_files",
            "Files that were not what they should be.",
        ),
    },
}
_GAUGES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "prompt_cache": {
        "entries": ("mantou_prompt_cache_entries", "Pieces of prompts in memory."),
        "bytes": ("mantou_prompt_cache_bytes", "Memory in use."),
        "protected_bytes": (
            "mantou_prompt_cache_protected_bytes",
            "Of it, what was reused or is an open session's.",
        ),
        "max_bytes": ("mantou_prompt_cache_max_bytes", "The budget, --prompt-cache."),
        "sessions": ("mantou_prompt_cache_sessions", "Sessions that are open."),
    },
    "ssd_cache": {
        "read_only": ("mantou_ssd_cache_read_only", "1 if the folder cannot be written."),
        "entries": ("mantou_ssd_cache_entries", "Files."),
        "bytes": ("mantou_ssd_cache_bytes", "Space in use."),
        "max_bytes": ("mantou_ssd_cache_max_bytes", "The budget, --ssd-cache DIR:SIZE."),
        "pending_snapshots": ("mantou_ssd_cache_pending_files", "Files that wait to be written."),
        "pending_spill_bytes": ("mantou_ssd_cache_pending_bytes", "Memory that they take."),
        "restore_ms_last": (
            "mantou_ssd_cache_last_restore_milliseconds",
            "How long the last restore was read.",
        ),
        "longest_durable_prefix_tokens": (
            "mantou_ssd_cache_longest_prefix_tokens",
            "The longest prompt that is complete on the SSD.",
        ),
    },
    "generation_checkpoints": {
        "every_tokens": ("mantou_generation_checkpoints_every_tokens", "The flag, --generation-checkpoint."),
        "entries": ("mantou_generation_checkpoints_entries", "Answers in progress on the SSD."),
        "bytes": ("mantou_generation_checkpoints_bytes", "Space in use."),
        "max_bytes": ("mantou_generation_checkpoints_max_bytes", "The most that they may take."),
        "pending": ("mantou_generation_checkpoints_pending_files", "Files that wait to be written."),
        "pending_bytes": ("mantou_generation_checkpoints_pending_bytes", "Memory that they take."),
    },
}


def samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Of `PrefixStore.stats()` and `CheckpointStore.stats()`; what is off has none."""
    for table, grows in ((_COUNTERS, True), (_GAUGES, False)):
        for block, names in table.items():
            found = stats.get(block, {})
            for key, (name, doc) in names.items():
                if key in found:
                    yield Sample(name, doc, float(found[key]), grows)


def step_samples(times: Mapping[str, Any]) -> Iterator[Sample]:
    """Of `steps_timed` in the engine's numbers: the last few thousand steps."""
    for key, name, doc in (
        ("median_s", "mantou_step_seconds_median", "Of the last steps of the model thread."),
        ("p99_s", "mantou_step_seconds_p99", "99 of 100 of the last steps took no longer."),
        ("max_s", "mantou_step_seconds_max", "The longest of the last steps."),
        ("store_max_s", "mantou_step_cache_seconds_max", "The prompt cache's longest part in one of them."),
    ):
        if key in times:
            yield Sample(name, doc, float(times[key]), grows=False)
