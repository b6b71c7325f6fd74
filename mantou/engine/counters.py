"""Plain counts of what the engine did. The api turns them into /stats and /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    steps: int = 0
    pipelined_steps: int = 0  # launched before the previous step's tokens were read
    prompt_tokens: int = 0  # fed to the model, cached ones not counted
    cached_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens asked of the prefix store
    prefix_hits: int = 0
    drafts: int = 0  # rounds in which a row guessed
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    injected_tokens: int = 0  # appended without a draw
    max_chunks_between_tokens: int = 0  # the fairness bound, measured: prompt chunks a running row waited for
    failed_forwards: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
