"""When a row's KV is looked up, and when it is offered to the prefix store. Knows no scheduling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from mantou.engine.axes import Axes
from mantou.engine.counters import Counters
from mantou.engine.sequence import Sequence
from mantou.kv.batch import RowView
from mantou.models.runner import Runner

log = logging.getLogger(__name__)

# New tokens after which a row's KV is offered again: a prompt that is interrupted keeps what was computed, and a
# sliding window's columns are copied before they are overwritten.
PUBLISH_EVERY = 256


class Prefix:
    def __init__(self, runner: Runner, axes: Axes, counters: Counters) -> None:
        self._runner = runner
        self._axes = axes
        self._counters = counters

    @property
    def keeps_state(self) -> bool:
        """Whether recurrent states are kept, which fit one position only."""
        return self._runner.recurrent and self._axes.store.wants

    def prefetch(self, sequence: Sequence, wake: Callable[[], None]) -> None:
        """Starts to bring what slow tiers hold of a prompt, while its request waits."""
        request = sequence.request
        key = self._axes.cache_key(self._axes.adapters.revision(request.adapters))
        sequence.ticket = self._axes.store.prefetch(key, request.prompt, request.session, wake)

    def reuse(self, sequence: Sequence) -> None:
        """Fills a fresh row with what is stored of its prompt."""
        request = sequence.request
        # The adapters' content may have changed while the request waited, and with it the key.
        sequence.cache_key = self._axes.cache_key(self._axes.adapters.revision(request.adapters))
        self._counters.prefix_queries += sequence.num_prompt
        hit = self._axes.store.match(sequence.cache_key, request.prompt, request.session)
        if hit is not None:
            self._runner.kv.fill(sequence.slot, hit)
            sequence.num_kv = sequence.num_cached = sequence.num_published = hit.num_tokens
            self._counters.prefix_hits += hit.num_tokens
            self._counters.cached_tokens += hit.num_tokens

    def publish_progress(self, running: Iterable[Sequence]) -> None:
        """Offers prompts when they are complete, and long rows on the way."""
        if not self._axes.store.wants:
            return
        for row in running:
            fresh = row.num_kv - row.num_published
            prompt_done = row.num_pending == 1 and row.num_published < row.num_prompt - 1
            now_or_never = fresh + self._runner.max_width > self._runner.kv.num_kept_columns  # a ring wraps
            due = fresh >= PUBLISH_EVERY or now_or_never or prompt_done
            if row.finish is None and fresh > 0 and due:
                self.publish(row)

    def publish(self, row: Sequence) -> None:
        """Offers the row's KV under the tokens it really holds."""
        if self._axes.store.wants and row.num_kv > row.num_published and row.cache_key is not None:
            view = RowView(self._runner.kv, row.slot)
            try:
                self._axes.store.put(row.cache_key, row.held, view, row.request.session)
            except Exception:  # the boundary: what is not kept costs a later prefill, but not this answer
                log.exception("the prefix store did not keep request %s", row.id)
            row.num_published = row.num_kv
