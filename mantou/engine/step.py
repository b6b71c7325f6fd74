"""One step of the engine: plan, place, propose, forward, draw, commit. No axis (codec, provider, grammar, store,
adapter, family) has a branch here: each is an object of `protocols.py`, and "off" is a null object.

Pipelining: while the decoding rows stay the same and none of them needs the host (drafts, constraints, penalties), the
next forward takes its tokens from the device and is launched before the last one's are read. Slots only change while
nothing is in flight.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from mantou.data import FinishReason, Request, TokenEvent
from mantou.engine.counters import Counters
from mantou.engine.flight import Drawn, Flight
from mantou.engine.pacing import Pacer
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.slots import Slots, runs
from mantou.kv.batch import RowView
from mantou.models.runner import Runner
from mantou.protocols import (
    Adapters,
    CacheKey,
    Constraints,
    DraftProvider,
    Group,
    Plan,
    PrefixStore,
    Sampler,
    Scheduler,
)
from mantou.sampling.verify import agree

log = logging.getLogger(__name__)

# New tokens after which a row's KV is offered to the prefix store again: a prompt that is interrupted keeps what was
# computed, and a sliding window's columns are copied before they are overwritten.
PUBLISH_EVERY = 256


@dataclass(frozen=True, slots=True)
class Axes:
    """Everything that composes. `build.py` fills it; tests put fakes in."""

    scheduler: Scheduler
    sampler: Sampler
    provider: DraftProvider
    constraints: Constraints
    store: PrefixStore
    adapters: Adapters
    cache_key: Callable[[tuple[str, ...]], CacheKey]


class Step:
    """Holds the sequences and advances them. Only the model thread calls it."""

    def __init__(self, runner: Runner, axes: Axes, shapes: Shapes, *, context_length: int) -> None:
        self.runner = runner
        self.axes = axes
        self.shapes = shapes
        self.context_length = context_length
        self.pacer = Pacer(runner.max_width)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.slots = Slots(shapes)
        self._flights: list[Flight] = []
        self._events: list[TokenEvent] = []
        self._prepared: tuple[tuple[str, ...], Any] = ((), None)
        self._last_kind: tuple[bool, bool] = (False, False)

    # ------------------------------------------------------------------ what the engine asks
    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._flights)

    def submit(self, request: Request) -> None:
        room = self.context_length - len(request.prompt)
        sequence = Sequence(request, room if request.max_tokens is None else min(room, request.max_tokens))
        if not request.prompt:
            self._end(sequence, "error", "the prompt holds no token")
        elif room <= 0:
            self._end(sequence, "error", f"a prompt of {len(request.prompt)} tokens does not fit the context")
        elif sequence.limit <= 0:
            self._end(sequence, "length")
        elif self._own_fault(sequence, lambda: self._constrain(sequence)):
            self.waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Frees the row at once; unknown ids are ignored, because the row may have finished meanwhile."""
        for sequence in (*self.waiting, *self.running):
            if sequence.id == request_id:
                self.land()
                if sequence.finish is None:
                    self._end(sequence, "cancelled")
                self._reap()
                return

    def advance(self) -> None:
        """One step. Its events wait in `take_events`, to be delivered with one wake-up."""
        started = time.perf_counter()
        if not self._flights:
            self._reap()
        plan = self._plan()
        if self._flights and not self._continues(plan):
            self.land()
            plan = self._plan()
        self._admit(plan)
        self._settle()
        num_decoding, num_prompt = self._launch(plan)
        self._publish_progress()
        self._measure(time.perf_counter() - started, num_decoding, num_prompt)
        self.counters.steps += 1

    def land(self) -> None:
        """Reads everything in flight and frees the rows that ended."""
        flights, self._flights = self._flights, []
        for flight in flights:
            self._collect(flight)
        self._reap()

    def take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def fail_all(self, reason: str) -> None:
        """Ends every request, waiting or running, without touching the device."""
        self._flights = []
        self.runner.abort()
        for sequence in (*self.waiting, *self.running):
            self._end(sequence, "error", reason)
        self._reap()

    def check_integrity(self) -> None:
        """Raises AssertionError if a row leaked or the books disagree. For debugging and test teardown."""
        kv = self.runner.kv
        kv.check_integrity()
        for slot, row in enumerate(self.slots.rows):
            assert row is None or (row.slot == slot and row in self.running), (slot, row)
        assert len(self.slots) == len(self.running), (len(self.slots), len(self.running))
        if not self._flights:
            for row in self.running:
                assert row.num_inflight == 0 and kv.lengths[row.slot] == row.num_kv, row
        if not self.busy:
            assert kv.num_slots == 0, kv.lengths

    # ------------------------------------------------------------------ plan
    def _plan(self) -> Plan:
        waiting = [sequence.load() for sequence in self.waiting]
        running = [sequence.load() for sequence in self.running if sequence.finish is None]
        num_decoding = sum(load.num_pending == 1 for load in running)
        return self.axes.scheduler.plan(waiting, running, self.pacer.chunk(num_decoding))

    def _continues(self, plan: Plan) -> bool:
        """Whether the next step can be launched on top of the one in flight."""
        if plan.admit or len(self._flights) != 1:
            return False
        flight = self._flights[0]
        return flight.group.lo == 0 and flight.rows == self._decode_slice(self._decoding(plan))

    def _decoding(self, plan: Plan) -> list[Sequence]:
        return [row for row in self.running if row.id in plan.num_tokens and row.decoding]

    def _decode_slice(self, decoding: Rows[Sequence]) -> list[Sequence | None]:
        """The rows of the decode slice by slot, None where a slot is idle in this step."""
        rows: list[Sequence | None] = [None] * min(self.slots.decode_span, self.runner.kv.num_slots)
        for row in decoding:
            rows[row.slot] = row
        return rows

    # ------------------------------------------------------------------ place
    def _admit(self, plan: Plan) -> None:
        by_id = {sequence.id: sequence for sequence in self.waiting} if plan.admit else {}
        for request_id in plan.admit:
            sequence = by_id[request_id]
            self.waiting.remove(sequence)
            self.running.append(sequence)
            slot = self.slots.join(sequence)
            self.runner.kv.resize(max(self.runner.kv.num_slots, self.slots.num_wanted))
            self.runner.kv.clear(slot)
            self._own_fault(sequence, lambda s=sequence: self._reuse_prefix(s))
        if plan.admit:
            self._reap()

    def _reuse_prefix(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.cache_key = self.axes.cache_key(self.axes.adapters.revision(request.adapters))
        self.counters.prefix_queries += sequence.num_prompt
        hit = self.axes.store.match(sequence.cache_key, request.prompt, request.session)
        if hit is not None:
            self.runner.kv.fill(sequence.slot, hit)
            sequence.num_kv = sequence.num_cached = sequence.num_published = hit.num_tokens
            self.counters.prefix_hits += hit.num_tokens
            self.counters.cached_tokens += hit.num_tokens

    def _settle(self) -> None:
        """Decoding rows to the front, buffers to the number of slots in use. Only while nothing is in flight."""
        if self._flights:
            return
        kv = self.runner.kv
        for move in self.slots.settle():
            (kv.swap if move.swap else kv.move)(move.source, move.target)
        wanted = self.slots.num_wanted
        if wanted > kv.num_slots or wanted * 4 <= kv.num_slots or not wanted:
            kv.resize(wanted)

    # ------------------------------------------------------------------ launch
    def _launch(self, plan: Plan) -> tuple[int, int]:
        """Launches the decode and the prompt groups, then reads the previous step. Returns (rows, prompt tokens)."""
        previous, self._flights = self._flights, []
        self.counters.pipelined_steps += bool(previous)
        decoding = self._decoding(plan)
        prompts = [row for row in self.running if row.id in plan.num_tokens and row.num_pending > 1]
        drafts = {} if previous else {row.id: self._propose(row) for row in decoding}
        for group, rows in self._decode_groups([row for row in decoding if row.finish is None], drafts):
            self._fly(group, rows, [drafts.get(row.id, ()) if row else () for row in rows], previous)
        num_prompt = 0
        for row in prompts:
            num_tokens = self._chunk(row, plan.num_tokens[row.id])
            self._fly(Group(row.slot, self._width(num_tokens), (num_tokens,)), [row], [()], [])
            num_prompt += num_tokens
        for flight in previous:
            self._collect(flight)
        if not decoding and prompts:
            self.runner.wait()  # bounds how far prompt chunks run ahead of the device
        self.counters.prompt_tokens += num_prompt
        waited = int(bool(decoding and prompts))
        self.counters.max_chunks_between_tokens = max(self.counters.max_chunks_between_tokens, waited)
        return len(decoding), num_prompt

    def _chunk(self, row: Sequence, planned: int) -> int:
        """Prompt tokens of this step. Where the store keeps states, the last token runs on its own, so that the state
        before it is there when the same prompt comes again."""
        num_tokens = min(planned, row.num_pending, self.runner.max_width)
        keeps_state = self.runner.recurrent and self.axes.store.wants
        return num_tokens - 1 if keeps_state and num_tokens == row.num_pending else num_tokens

    def _needs_host(self, row: Sequence) -> bool:
        return (
            row.constraint is not None
            or self._draft_width(row) > 0
            or self.axes.sampler.wants_history(row.request.sampling)
        )

    def _draft_width(self, row: Sequence) -> int:
        widths = [0]
        self._own_fault(row, lambda: widths.append(self.axes.provider.width(row.request)))
        return widths[-1]

    def _propose(self, row: Sequence) -> Rows[int]:
        width = min(self._draft_width(row), row.num_left - 1, self.runner.max_width - 1)
        if width <= 0:
            return ()
        proposed: list[int] = []
        self._own_fault(
            row, lambda: proposed.extend(self.axes.provider.propose(row.request, row.tokens, width)[:width])
        )
        return proposed

    def _width(self, num_tokens: int) -> int:
        if not self.runner.ragged_widths:
            return num_tokens
        return min(self.shapes.width(num_tokens), self.runner.max_width)  # a ring has no room for more

    def _decode_groups(
        self, decoding: Rows[Sequence], drafts: dict[str, Rows[int]]
    ) -> list[tuple[Group, list[Sequence | None]]]:
        """One group over the decode slice, or runs of equal rows for graphs that cannot mix them."""

        def likeness(row: Sequence | None) -> object:
            if self.runner.ragged_widths and self.runner.ragged_offsets:
                return None
            return row and (row.num_kv, len(drafts.get(row.id, ())))

        groups: list[tuple[Group, list[Sequence | None]]] = []
        for lo, part in runs(self._decode_slice(decoding), likeness):
            num_tokens = tuple(1 + len(drafts.get(row.id, ())) if row else 0 for row in part)
            if any(num_tokens):
                groups.append((Group(lo, self._width(max(num_tokens)), num_tokens), part))
        return groups

    def _fly(
        self, group: Group, rows: list[Sequence | None], drafts: Rows[Rows[int]], previous: list[Flight]
    ) -> None:
        """Launches one group. If that raises, each row is tried alone, so that only the one at fault ends."""
        try:
            flight = self._forward(group, rows, drafts, previous)
        except Exception as error:  # the boundary: whatever a graph raises ends a request, never the engine
            self.runner.abort()
            self.counters.failed_forwards += 1
            self._retry_alone(group, rows, previous, error)
            return
        if flight is None:
            return
        if any(self._needs_host(row) for row in flight.sequences):
            self._collect(flight)
        else:
            self._flights.append(flight)

    def _retry_alone(
        self, group: Group, rows: list[Sequence | None], previous: list[Flight], error: Exception
    ) -> None:
        while previous:  # their tokens must be on the host: a row may have ended by them
            self._collect(previous.pop())
        active = [row for row in rows if row is not None]
        if len(active) == 1:
            if active[0].finish is None:
                log.error("request %s failed in the model", active[0].id, exc_info=error)
                self._end(active[0], "error", f"the model failed on this request: {error}")
            return
        for i, row in enumerate(rows):
            if row is not None and row.finish is None:
                num_tokens = min(row.num_pending, group.num_tokens[i])
                self._fly(Group(group.lo + i, num_tokens, (num_tokens,)), [row], [()], [])

    def _forward(
        self, group: Group, rows: list[Sequence | None], drafts: Rows[Rows[int]], previous: list[Flight]
    ) -> Flight | None:
        """Builds and launches a group's graph. None if it draws no token (a prompt chunk that is not the last)."""
        drafting = any(drafts)
        wanted = None if drafting else [max(n - 1, 0) for n in group.num_tokens]
        tokens = previous[0].draw.tokens if previous else self._feed(group, rows, drafts)
        self.axes.adapters.bind([row.request.adapters if row else () for row in rows])
        tokens, logits = self.runner.forward(group, tokens, wanted)
        draw = None
        if any(
            row and row.num_kv + n >= len(row.tokens) for row, n in zip(rows, group.num_tokens, strict=True)
        ):
            columns = [range(group.width)] * len(rows) if wanted is None else [(w,) for w in wanted]
            positions = [
                [(row.num_kv if row else 0) + c + 1 for c in cs]
                for row, cs in zip(rows, columns, strict=True)
            ]
            draw = self._draw(logits, rows, drafts, positions)
        self.runner.launch(draw)
        if not drafting:
            self.runner.kv.commit(group, group.num_tokens)
        for row, num_tokens in zip(rows, group.num_tokens, strict=True):
            if row is not None:
                row.num_kv += 0 if drafting else num_tokens
                row.num_inflight += int(draw is not None)
        return None if draw is None else Flight(group, rows, tokens, draw, drafts, committed=not drafting)

    @staticmethod
    def _feed(group: Group, rows: list[Sequence | None], drafts: Rows[Rows[int]]) -> list[list[int]]:
        return [
            [*row.next_tokens(n - len(draft)), *draft] if row else []
            for row, n, draft in zip(rows, group.num_tokens, drafts, strict=True)
        ]

    # ------------------------------------------------------------------ draw
    def _draw(
        self, logits: Any, rows: list[Sequence | None], drafts: Rows[Rows[int]], positions: Rows[Rows[int]]
    ) -> Any:
        ids = tuple(row.id if row else "" for row in rows)
        if self._prepared[0] != ids:
            wishes = [row.request.sampling if row else None for row in rows]
            self._prepared = (ids, self.axes.sampler.prepare(wishes))
        history = [(row.tokens if row else (), draft) for row, draft in zip(rows, drafts, strict=True)]
        allowed: list[tuple[int, int, Any]] = []
        for i, row in enumerate(rows):
            if row is not None and row.constraint is not None:
                self._own_fault(row, lambda i=i, row=row: allowed.extend(self._allowed(i, row, drafts[i])))
        return self.axes.sampler.draw(logits, self._prepared[1], positions, history=history, allowed=allowed)

    @staticmethod
    def _allowed(index: int, row: Sequence, draft: Rows[int]) -> list[tuple[int, int, Any]]:
        """(row, position, uint8[V] mask) of each draft position that the row's constraint restricts."""
        constraint = row.constraint
        assert constraint is not None
        found: list[tuple[int, int, Any]] = []
        advanced = 0
        for t in range(len(draft) + 1):
            mask = constraint.mask()
            if mask is not None:
                found.append((index, t, mask))
            if t == len(draft) or (mask is not None and not mask[draft[t]]):
                break  # a forbidden draft token cannot be drawn, so what follows it does not matter
            constraint.advance(draft[t])
            advanced += 1
        constraint.rewind(advanced)
        return found

    # ------------------------------------------------------------------ commit
    def _collect(self, flight: Flight) -> None:
        """Reads a flight and takes its tokens into the sequences."""
        try:
            drawn = flight.read()
        except RuntimeError as error:  # the device failed on the whole group: there is no row to blame
            log.exception("a forward failed on the device")
            for row in flight.sequences:
                self._end(row, "error", f"the device failed: {error}")
            return
        kept = [0] * len(flight.rows)
        for i, row in enumerate(flight.rows):
            if row is None:
                continue
            row.num_inflight -= 1
            draft = flight.drafts[i]
            taken = agree(draft, drawn.tokens[i][: len(draft) + 1])
            kept[i] = len(taken)
            if row.finish is None:
                self._take(row, i, taken, drawn)
                self._observe(row, len(draft), len(taken) - 1)
        if not flight.committed:
            if not self.runner.kv.commit(flight.group, kept):
                self.runner.replay(flight.group, flight.tokens, kept)
            for row, num_tokens in zip(flight.rows, kept, strict=True):
                if row is not None:
                    row.num_kv += num_tokens

    def _observe(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._own_fault(row, lambda: self.axes.provider.observe(row.request, num_drafted, num_accepted))
        self.counters.drafted_tokens += num_drafted
        self.counters.accepted_tokens += num_accepted

    def _take(self, row: Sequence, index: int, taken: Rows[int], drawn: Drawn) -> None:
        emitted = row.extend(taken)
        self.counters.generation_tokens += len(emitted) + row.num_eos

        def advance() -> None:
            for token in emitted:
                if row.constraint is not None:
                    row.constraint.advance(token)

        if not self._own_fault(row, advance):
            return
        logprobs = drawn.logprobs_of(row, index, emitted)
        if row.finish is not None:
            self._end(row, row.finish, tokens=tuple(emitted), logprobs=logprobs)
        elif emitted:
            self._events.append(TokenEvent(row.id, tuple(emitted), logprobs))

    def _constrain(self, sequence: Sequence) -> None:
        sequence.constraint = self.axes.constraints.make(sequence.request)

    def _own_fault(self, row: Sequence, action: Callable[[], Any]) -> bool:
        """Runs a row's own hook; if it raises, that row ends with an error event and its neighbours go on."""
        try:
            action()
        except Exception as error:  # the boundary: one request's hook never stops the engine
            log.exception("request %s failed", row.id)
            self._end(row, "error", str(error) or type(error).__name__)
            return False
        return True

    def _end(
        self,
        row: Sequence,
        finish: FinishReason,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: Any = (),
    ) -> None:
        if row.ended:  # whatever fails afterwards, a request has one last event
            return
        row.finish, row.ended = finish, True
        self.counters.finished[finish] = self.counters.finished.get(finish, 0) + 1
        self._events.append(TokenEvent(row.id, tokens, logprobs, finish, error, row.usage()))

    def _reap(self) -> None:
        """Frees the slots of ended rows. Only while nothing is in flight."""
        for row in [row for row in self.running if row.finish is not None]:
            self.running.remove(row)
            if row.finish != "error":
                self._publish(row)
            self._own_fault(row, lambda row=row: self.axes.provider.release(row.request))
            self.runner.kv.release(row.slot)
            self.slots.leave(row)
        for row in [row for row in self.waiting if row.finish is not None]:
            self.waiting.remove(row)
        if not self.running:
            self.runner.kv.resize(0)

    def _publish_progress(self) -> None:
        """Offers prompts to the prefix store when they are complete, and long rows on the way."""
        if not self.axes.store.wants:
            return
        for row in self.running:
            fresh = row.num_kv - row.num_published
            prompt_done = row.num_pending == 1 and row.num_published < row.num_prompt - 1
            now_or_never = fresh + self.runner.max_width > self.runner.kv.num_kept_columns  # a ring wraps
            due = fresh >= PUBLISH_EVERY or now_or_never or prompt_done
            if row.finish is None and fresh > 0 and due:
                self._publish(row)

    def _publish(self, row: Sequence) -> None:
        """Offers the row's KV to the prefix store, under the tokens it really holds."""
        if self.axes.store.wants and row.num_kv > row.num_published and row.cache_key is not None:
            view = RowView(self.runner.kv, row.slot)
            try:
                self.axes.store.put(row.cache_key, row.held, view, row.request.session)
            except Exception:  # the boundary: what is not kept costs a later prefill, but not this answer
                log.exception("the prefix store did not keep request %s", row.id)
            row.num_published = row.num_kv

    def _measure(self, seconds: float, num_decoding: int, num_prompt: int) -> None:
        kind = (bool(num_decoding), bool(num_prompt))
        if kind == self._last_kind:  # the first step after a change still pays for the one before
            self.pacer.observe(seconds, num_decoding, num_prompt)
        self._last_kind = kind
