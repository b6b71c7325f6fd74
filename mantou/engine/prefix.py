"""When a row's KV is looked up, and when it is offered to the prefix store. Knows no scheduling.

Both copy, on the thread that computes. While other rows decode they get their tokens in between: a share of a decode
step is used up, in small parts, and the rest waits for the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Tokens

from mantou.data import Request
from mantou.engine.axes import Axes
from mantou.engine.counters import Counters
from mantou.engine.media import stored_tokens
from mantou.engine.sequence import Sequence
from mantou.engine.timing import StepTimes
from mantou.kv.batch import RowView
from mantou.kv.pieces import CopiedRow
from mantou.models.runner import Runner
from mantou.protocols import CacheKey, RowKV, Ticket

log = logging.getLogger(__name__)

# New tokens after which a row's KV is offered again: a prompt that is interrupted keeps what was computed, and a
# sliding window's columns are copied before they are overwritten.
PUBLISH_EVERY = 256
# A state where prompts part is kept if it saves at least so many tokens of the next prompt that parts there.
MIN_GAIN = 64
MIN_REUSED = 8  # tokens: fewer are computed, beside the rest of the prompt, sooner than they are copied
# Of a decode step: a restored prompt is waited for; for what is kept a little is plenty, as it grows token by token,
# and a part that is interrupted in the middle should not show.
RESTORE_SHARE, KEEP_SHARE = 0.25, 0.05


class Prefix:
    def __init__(self, runner: Runner, axes: Axes, counters: Counters, times: StepTimes) -> None:
        self._runner = runner
        self._axes = axes
        self._counters = counters
        self._times = times
        self._decode_s: float | None = None  # what copies take a share of; None = nobody waits for them

    @property
    def keeps_state(self) -> bool:
        """Whether recurrent states are kept, which fit one position only."""
        return self._runner.recurrent and self._axes.store.wants

    def allow(self, decode_s: float | None) -> None:
        """A step begins: how long its decoding takes, or None where no row decodes."""
        self._decode_s = decode_s

    def _in_time(self, share: float) -> bool:
        """Whether there is time for another part of a copy; there is for one in every step."""
        spent = self._times.store_s
        return self._decode_s is None or spent == 0.0 or spent < share * self._decode_s

    def key(self, request: Request) -> CacheKey:
        """What its numbers depend on now: an adapter's content may be another by the time that it runs."""
        return self._axes.cache_key(self._axes.adapters.revision(request.adapters))

    def prefetch(self, sequence: Sequence, wake: Callable[[], None]) -> Ticket:
        """Starts to bring what slow tiers hold of a row's known tokens, while it waits."""
        request = sequence.request
        tokens = stored_tokens(sequence.tokens, request.media)
        return self._axes.store.prefetch(self.key(request), tokens, request.session, wake)

    def reuse(self, sequence: Sequence) -> None:
        """Begins to fill a fresh row with what is stored of its prompt."""
        with self._times.store():
            self._reuse(sequence)

    def restore(self, sequence: Sequence) -> None:
        """Goes on with that: to the end, or as far as this step's time goes."""
        with self._times.store():
            for _ in sequence.restoring or ():
                if self._decode_s is not None:
                    self._runner.wait()
                    if not self._in_time(RESTORE_SHARE):
                        return
            sequence.restoring = None

    def _reuse(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.cache_key = self.key(request)
        self._counters.prefix_queries += sequence.num_prompt
        tokens = stored_tokens(sequence.tokens, request.media)
        hit = self._axes.store.match(sequence.cache_key, tokens, request.session)
        if self.keeps_state:
            sequence.marks = self._marks(request, tokens, sequence.cache_key, hit.num_tokens if hit else 0)
        if hit is not None and hit.num_tokens >= MIN_REUSED:
            sequence.restoring = self._runner.kv.filling(lambda: sequence.slot, hit)
            sequence.num_kv = sequence.num_published = hit.num_tokens
            sequence.num_cached = min(hit.num_tokens, sequence.num_prompt)  # not an answer that is taken up
            self._counters.prefix_hits += sequence.num_cached
            self._counters.cached_tokens += sequence.num_cached

    def _marks(self, request: Request, tokens: Tokens[int], key: CacheKey, reused: int) -> tuple[int, ...]:
        """Where other prompts are likely to part from this one: at the ends of messages, and where it left the stored
        one that it has most in common with."""
        marks = {at for at in request.boundaries if reused < at < len(request.prompt) - 1}
        common = self._axes.store.reach(key, tokens)
        if reused + MIN_GAIN <= common < len(request.prompt) - 1:
            marks.add(common)
        return tuple(sorted(marks))

    def until_state(self, row: Sequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` run at once, as states fit one position only. The last token of a prompt
        runs on its own, so that the state before it is there when the same prompt comes again."""
        if not self.keeps_state:
            return num_tokens
        until = [at - row.num_kv for at in row.marks if row.num_kv < at <= row.num_kv + num_tokens]
        if until:
            return until[0]
        return num_tokens - 1 if num_tokens == row.num_pending else num_tokens

    def publish_progress(self, running: Collection[Sequence]) -> None:
        """Offers prompts when they are complete, and long rows on the way."""
        if not self._axes.store.wants:
            return
        if self._decode_s is None and any(row.decoding and row.finish is None for row in running):
            self._decode_s = 0.0  # a prompt is complete: now somebody waits, if only for a first token
        for row in running:
            fresh = row.num_kv - row.num_published
            prompt_done = row.num_pending == 1 and row.num_published < row.num_prompt - 1
            now_or_never = fresh + self._runner.max_width > self._runner.kv.num_kept_columns  # a ring wraps
            ends = prompt_done or row.num_kv in row.marks
            due = fresh >= PUBLISH_EVERY or ends
            if row.finish is not None or row.restoring is not None or fresh <= 0:
                continue
            if now_or_never or (due and self._at_once):
                self.publish(row, passing=not ends)
            elif due or row.copying is not None:
                self._copy(row, row.num_kv if ends else row.num_kv // PUBLISH_EVERY * PUBLISH_EVERY)

    def publish_rest(self, row: Sequence) -> bool:
        """Offers what an ended row holds, as far as this step's time goes. False: the row has to stay for the next."""
        if self._at_once or not self._axes.store.wants or row.cache_key is None:
            self.publish(row)
            return True
        while row.num_published < row.num_kv and self._copy(row, row.num_kv):
            pass
        return row.num_published == row.num_kv

    @property
    def _at_once(self) -> bool:
        """Whether a copy is made in one go: a state fits one position only, and where no row decodes nobody waits."""
        return self.keeps_state or self._decode_s is None

    def _copy(self, row: Sequence, end: int) -> bool:
        """Goes on with the copy of a row in progress, or begins one up to position `end`, as far as this step's time
        goes. Returns whether it is complete."""
        if not self._in_time(KEEP_SHARE):
            return False
        with self._times.store():
            if row.copying is None:
                row.copying = self._parts(row, end)
            try:
                for _ in row.copying:
                    if not self._in_time(KEEP_SHARE):
                        return False
            except Exception:  # the boundary, as in _put
                log.exception("the prefix store did not get a copy of request %s", row.id)
                row.num_published = row.num_kv
            row.copying = None
        return True

    def _parts(self, row: Sequence, end: int) -> Iterator[None]:
        """Copies and offers a row's columns block by block, in small parts of work.

        A store that is full may have given up what it was offered of the row. It gets that again, in parts like the
        rest, but only once: a store that cannot hold its rows side by side would ask for ever.
        """
        kv, went_back = self._runner.kv, False
        while row.num_published < end:
            lo = row.num_published
            hi = min(end, (lo // PUBLISH_EVERY + 1) * PUBLISH_EVERY)
            offered = CopiedRow((yield from kv.copying(lambda: row.slot, lo, hi)))
            self._put(row, hi, offered)
            lacking = offered.lacking
            if lacking is not None and not went_back and kv.reaches_back(row.slot, lacking):
                row.num_published, went_back = lacking, True
            yield

    def publish_little(self, row: Sequence) -> None:
        """Offers a row on the way, unless that is more than others should wait for."""
        if self._at_once or self._in_time(KEEP_SHARE) or row.num_kv - row.num_published <= PUBLISH_EVERY:
            self.publish(row, passing=True)

    def publish(self, row: Sequence, *, passing: bool = False) -> None:
        """Offers the row's KV under the tokens it really holds; `passing`: it is on the way, and nothing ends here."""
        if self._axes.store.wants and row.num_kv > row.num_published and row.cache_key is not None:
            row.copying = None
            view = RowView(self._runner.kv, row.slot, row.num_published if passing else None)
            with self._times.store():
                self._put(row, row.num_kv, view)

    def _put(self, row: Sequence, num_tokens: int, view: RowKV) -> None:
        assert row.cache_key is not None
        try:
            tokens = stored_tokens(row.held, row.request.media)[:num_tokens]
            self._axes.store.put(row.cache_key, tokens, view, row.request.session)
        except Exception:  # the boundary: what is not kept costs a later prefill, but not this answer
            log.exception("the prefix store did not keep request %s", row.id)
        row.num_published = num_tokens
