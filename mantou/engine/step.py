"""One step of the engine: plan, place, propose, forward, draw, commit. No axis (codec, provider, grammar, store,
adapter, family) has a branch here: each is an object of `protocols.py`, and "off" is a null object.

Pipelining: while the decoding rows stay the same and none of them needs the host (drafts, constraints, penalties), the
next forward takes its tokens from the device and is launched before the last one's are read. Slots only change while
nothing is in flight. Where the device is the CPU itself, building the next graph meanwhile takes a core from the
kernels (8 rows of a 135M model on 2 cores: 358 tok/s with it, 520 without), so `pipelined` is False there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows

from mantou.data import FinishReason, Request, TokenEvent
from mantou.engine.axes import Axes
from mantou.engine.checkpoints import Checkpoints
from mantou.engine.counters import Counters
from mantou.engine.drafting import Drafting
from mantou.engine.drawing import Drawing
from mantou.engine.flight import Drawn, Flight
from mantou.engine.groups import NO_DRAFT, Drafts, Feed, Grouping
from mantou.engine.pacing import Pacer
from mantou.engine.prefix import Prefix
from mantou.engine.roster import Roster
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.timing import StepTimes
from mantou.models.runner import Runner
from mantou.protocols import Forwarded, Plan

log = logging.getLogger(__name__)


class Step:
    """Advances the sequences of a roster on a runner. Only the model thread calls it; `wake`, which its owner sets, is
    called from other threads when a waiting sequence has become ready.
    """

    def __init__(
        self,
        runner: Runner,
        axes: Axes,
        shapes: Shapes,
        *,
        context_length: int,
        pipelined: bool = True,
        fill: bool = False,
    ) -> None:
        self.runner = runner
        self.axes = axes
        self.context_length = context_length
        self.pipelined = pipelined
        self.wake: Callable[[], None] = lambda: None
        self.pacer = Pacer(runner.max_width)
        self.counters = Counters()
        self.roster = Roster(shapes, self.counters)
        self._grouping = Grouping(shapes, runner.max_width, runner.ragged_offsets, runner.ragged_widths)
        self._drawing = Drawing(axes.sampler, self.roster, runner.start if pipelined else None)
        self._drafting = Drafting(axes.provider, self.roster, self.counters, self._room, fill=fill)
        self._fill = fill
        if axes.provider.wants_hidden:
            runner.capture_hidden()
        self.times = StepTimes()
        self._prefix = Prefix(runner, axes, self.counters, self.times)
        self._checkpoints = Checkpoints(axes.checkpoints, self._prefix, self.roster)
        self._flights: list[Flight] = []
        self._last_kind: tuple[bool, bool] = (False, False)
        self._decode_s = 0.0  # the decode part of this step's launch

    def _room(self, row: Sequence) -> int:
        """Most tokens that the row may feed in one forward."""
        return min(self.runner.max_width, self.runner.kv.room(row.num_kv))

    # ------------------------------------------------------------------ what the engine asks
    @property
    def waiting(self) -> deque[Sequence]:
        return self.roster.waiting

    @property
    def running(self) -> list[Sequence]:
        return self.roster.running

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do; sequences that wait for a slow tier are no work."""
        return bool(self.running or self._flights or any(sequence.ready for sequence in self.waiting))

    @property
    def _ending(self) -> bool:
        """Whether a row has ended and is still there."""
        return any(row.finish is not None for row in self.running)

    def submit(self, request: Request) -> None:
        room = self.context_length - len(request.prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        sequence = Sequence(request, limit, fills=self._fill)
        if not request.prompt:
            self.roster.end(sequence, "error", "the prompt holds no token")
        elif room <= 0:
            reason = f"a prompt of {len(request.prompt)} tokens does not fit the context"
            self.roster.end(sequence, "error", reason)
        elif sequence.limit <= 0:
            self.roster.end(sequence, "length")
        elif self.roster.own_fault(sequence, lambda: self._prepare(sequence)):
            self.waiting.append(sequence)

    def cancel(self, request_id: str, finish: FinishReason = "cancelled") -> None:
        """Frees the row at once; unknown ids are ignored, because the row may have finished meanwhile."""
        for sequence in self.roster.every():
            if sequence.id == request_id:
                self.land()
                if sequence.finish is None:
                    self.roster.end(sequence, finish)
                self._reap()
                return

    def advance(self) -> None:
        """One step. Its events wait in `take_events`, to be delivered with one wake-up."""
        started = time.perf_counter()
        self._prefix.allow(self._decode_time())
        if not self._flights:
            self._reap()
        self._restore()  # before the plan, which a row that is complete changes
        plan = self._plan()
        if self._flights and not self._continues(plan):
            self.land()
            plan = self._plan()
        self._admit(plan)
        self._settle()
        num_decoding, num_prompt = self._launch(plan)
        self._prefix.publish_progress(self.running)
        self._checkpoints.save_progress(self.running)
        left = self.times.end(time.perf_counter() - started)
        self._measure(left, num_decoding, num_prompt)
        self.counters.steps += 1

    def land(self) -> None:
        """Reads everything in flight and frees the rows that ended."""
        flights, self._flights = self._flights, []
        for flight in flights:
            self._collect(flight)
        self._reap()

    def take_events(self) -> list[TokenEvent]:
        return self.roster.take_events()

    def fail_all(self, reason: str) -> None:
        """Ends every request, waiting or running, without touching the device."""
        self._flights = []
        self.runner.abort()
        for sequence in self.roster.every():
            self.roster.end(sequence, "error", reason)
        self._reap()

    def check_integrity(self) -> None:
        """Raises AssertionError if a row leaked or the books disagree. For debugging and test teardown."""
        kv = self.runner.kv
        kv.check_integrity()
        self.roster.check_integrity()
        if not self._flights:
            for row in self.running:
                assert row.num_inflight == 0 and kv.lengths[row.slot] == row.num_kv, row
        if not self.busy:
            assert kv.num_slots == 0, kv.lengths

    # ------------------------------------------------------------------ plan
    def _plan(self) -> Plan:
        # Whoever comes next may go on from what an ended row still has to store.
        waiting = [] if self._ending else [sequence.load() for sequence in self.waiting if sequence.ready]
        running = [sequence.load() for sequence in self.running if sequence.finish is None]
        num_decoding = sum(load.num_pending == 1 for load in running)
        room = max(
            self.axes.scheduler.max_rows - len(self.running), 0
        )  # who finds no row is read no sooner for it
        num_prompts = min(len(waiting), room) + len(running) - num_decoding
        return self.axes.scheduler.plan(waiting, running, self.pacer.chunk(num_decoding, num_prompts))

    def _continues(self, plan: Plan) -> bool:
        """Whether the next step can be launched on top of the one in flight."""
        if plan.admit or len(self._flights) != 1 or self._ending:
            return False
        feed = self._flights[0].feed
        if any(self._needs_host(row) for row in feed.sequences):
            return False
        return feed.group.lo == 0 and feed.rows == self._decode_slice(self._decoding(plan))

    def _decoding(self, plan: Plan) -> list[Sequence]:
        return [row for row in self.running if row.id in plan.num_tokens and row.decoding]

    def _decode_slice(self, decoding: Rows[Sequence]) -> list[Sequence | None]:
        """The rows of the decode slice by slot, None where a slot is idle in this step."""
        rows: list[Sequence | None] = [None] * min(self.roster.slots.decode_span, self.runner.kv.num_slots)
        for row in decoding:
            rows[row.slot] = row
        return rows

    # ------------------------------------------------------------------ place
    def _prepare(self, sequence: Sequence) -> None:
        sequence.constraint = self.axes.constraints.make(sequence.request)
        self._checkpoints.find(sequence, self.wake)

    def _admit(self, plan: Plan) -> None:
        for request_id in plan.admit:
            sequence = self.roster.admit(request_id)
            self.runner.kv.resize(max(self.runner.kv.num_slots, self.roster.slots.num_wanted))
            self.runner.kv.clear(sequence.slot)
            if self.roster.own_fault(sequence, lambda s=sequence: self._checkpoints.admit(s)):
                self.roster.own_fault(sequence, lambda s=sequence: self._prefix.reuse(s))
            sequence.close_ticket()
        if plan.admit:
            self._reap()
            self._restore()

    def _decode_time(self) -> float | None:
        """Seconds that decoding takes in a step; None where no row decodes."""
        if not any(row.decoding and row.finish is None for row in self.running):
            return None
        return self.pacer.decode_s or 0.0

    def _restore(self) -> None:
        for row in [row for row in self.running if row.restoring is not None and row.finish is None]:
            self.roster.own_fault(row, lambda row=row: self._prefix.restore(row))
            if row.restoring is not None and row.finish is None:
                break  # first come, first served; and this step's time is over

    def _settle(self) -> None:
        """Decoding rows to the front, buffers to the number of slots in use. Only while nothing is in flight."""
        if self._flights:
            return
        kv = self.runner.kv
        for move in self.roster.slots.settle():
            (kv.swap if move.swap else kv.move)(move.source, move.target)
        wanted = self.roster.slots.num_wanted
        if wanted > kv.num_slots or wanted * 4 <= kv.num_slots or not wanted:
            kv.resize(wanted)

    # ------------------------------------------------------------------ launch
    def _launch(self, plan: Plan) -> tuple[int, int]:
        """Launches the decode and the prompt groups, then reads the previous step. Returns (rows, prompt tokens)."""
        previous, self._flights = self._flights, []
        self.counters.pipelined_steps += bool(previous)
        started = time.perf_counter()
        decoding = self._decoding(plan)
        prompts = [row for row in self.running if row.id in plan.num_tokens and row.prefilling]
        drafts: Drafts = {} if previous else self._drafting.drafts(decoding)
        able = self._decode_slice([row for row in decoding if row.finish is None])
        groups = self._grouping.decode(able, drafts)
        held = sum(row.num_kv for row in decoding)
        proposed = time.perf_counter()
        for group, rows in groups:
            guesses = [drafts.get(row.id, NO_DRAFT) if row else NO_DRAFT for row in rows]
            self._fly(Feed(group, rows, guesses), previous)
        self._decode_s = time.perf_counter() - started
        if len(groups) == 1 and not (previous or self._flights):
            fed = [n for n in groups[0][0].num_tokens if n]
            self._drafting.timed(fed, held, time.perf_counter() - proposed)
        chunks = [(row, self._chunk(row, plan.num_tokens[row.id])) for row in prompts]
        for group, fed in self._grouping.prompts(chunks):
            self._fly(Feed(group, fed, [NO_DRAFT] * len(fed)), [])
        num_prompt = sum(num_tokens for _, num_tokens in chunks)
        for flight in previous:
            self._collect(flight)
        if prompts and not (decoding and self.pipelined):
            self.runner.wait()  # bounds how far prompt chunks run ahead of the device
        waited = int(bool(decoding and prompts))
        self.counters.max_chunks_between_tokens = max(self.counters.max_chunks_between_tokens, waited)
        return len(decoding), num_prompt

    def _chunk(self, row: Sequence, planned: int) -> int:
        """Prompt tokens of this step."""
        return self._prefix.until_state(row, min(planned, row.num_pending, self._room(row)))

    def _needs_host(self, row: Sequence) -> bool:
        return (
            row.constraint is not None
            or self._drafting.width(row) > 0
            or self.axes.sampler.wants_history(row.request.sampling)
        )

    def _fly(self, feed: Feed, previous: list[Flight]) -> None:
        """Launches one group. If that raises, each row is tried alone, so that only the one at fault ends."""
        try:
            flight = self._forward(feed, previous)
        except Exception as error:  # the boundary: whatever a graph raises ends a request, never the engine
            self.runner.abort()
            self.counters.failed_forwards += 1
            self._retry_alone(feed, previous, error)
            return
        if flight is None:
            return
        if previous:  # that one is read first; whether the next step waits for this one shows then
            self._flights.append(flight)
        elif not self.pipelined or feed.drafting or any(self._needs_host(row) for row in feed.sequences):
            self._collect(flight)
        else:
            self._flights.append(flight)

    def _retry_alone(self, feed: Feed, previous: list[Flight], error: Exception) -> None:
        while previous:  # their tokens must be on the host: a row may have ended by them
            self._collect(previous.pop())
        active = feed.sequences
        if len(active) == 1:
            if active[0].finish is None:
                log.error("request %s failed in the model", active[0].id, exc_info=error)
                self.roster.end(
                    active[0], "error", "The model failed on this request; the server's log says why."
                )
            return
        for i, row in enumerate(feed.rows):
            if row is not None and row.finish is None:
                self._fly(feed.alone(i), [])

    def _forward(self, feed: Feed, previous: list[Flight]) -> Flight | None:
        """Builds and launches a group's graph. None if it draws no token (a prompt chunk that is not the last)."""
        tokens = previous[0].draw.tokens if previous else feed.tokens()
        self.axes.adapters.bind([row.request.adapters if row else () for row in feed.rows])
        tokens, logits = self.runner.forward(feed.group, tokens, feed.wanted, rewindable=feed.drafting)
        draw = self._drawing.draw(logits, feed) if feed.draws else None
        self.runner.launch(draw)
        flight = Flight(feed, tokens, draw, self.runner.take_hidden(), committed=not feed.drafting)
        if flight.committed:
            self.runner.kv.commit(feed.group, feed.group.num_tokens)
            self._absorb(flight, feed.group.num_tokens)
        for row, num_tokens in zip(feed.rows, feed.group.num_tokens, strict=True):
            if row is not None:
                self.counters.prompt_tokens += max(min(num_tokens, row.num_prompt - row.num_kv), 0)
                row.num_kv += num_tokens if flight.committed else 0
                row.num_inflight += int(draw is not None)
        return None if draw is None else flight

    def _absorb(self, flight: Flight, kept: Rows[int]) -> None:
        """Shows what was committed to a provider that reads hidden states. Called before the rows' lengths grow."""
        if flight.hidden is not None:
            rows = flight.feed.rows
            requests = [row.request if row else None for row in rows]
            starts = [row.num_kv if row else 0 for row in rows]
            kv = self.runner.kv
            self._drafting.absorb(Forwarded(requests, starts, kept, flight.tokens, flight.hidden, kv))

    # ------------------------------------------------------------------ commit
    def _collect(self, flight: Flight) -> None:
        """Reads a flight and takes its tokens into the sequences."""
        feed = flight.feed
        try:
            drawn = flight.read()
        except RuntimeError:  # the device failed on the whole group: there is no row to blame
            log.exception("a forward failed on the device")
            for row in feed.sequences:
                self.roster.end(row, "error", "The device failed; the server's log says why. Try again.")
            return
        kept = [0] * len(feed.rows)
        for i, (row, draft) in enumerate(zip(feed.rows, feed.drafts, strict=True)):
            if row is None:
                continue
            row.num_inflight -= 1
            taken = drawn.taken(i, draft)
            kept[i] = len(taken)
            if row.finish is not None:
                continue
            num_draws = len(taken) - draft.num_sure
            if self.roster.own_fault(row, lambda i=i, n=num_draws: drawn.check(i, n)):
                self._drafting.observe(row, draft, taken)
                kept[i] = min(len(taken), self._take(row, i, taken, drawn) + 1)
        if not flight.committed:
            self._absorb(flight, kept)
            if not self.runner.kv.commit(feed.group, kept):
                self.runner.replay(feed.group, flight.tokens, kept)
            for row, num_tokens in zip(feed.rows, kept, strict=True):
                if row is not None:
                    row.num_kv += num_tokens

    def _take(self, row: Sequence, index: int, taken: Rows[int], drawn: Drawn) -> int:
        """Takes drawn tokens into the row, up to its end. Returns how many, EOS counted."""
        emitted = row.extend(taken)
        num_taken = len(emitted) + row.num_eos
        self.counters.generation_tokens += num_taken
        if self.roster.own_fault(row, lambda: row.advance_constraint(emitted)):
            self.roster.emit(row, tuple(emitted), drawn.logprobs_of(row, index, emitted), row.finish)
        return num_taken

    def _reap(self) -> None:
        """Frees the slots of ended rows. Only while nothing is in flight."""
        for row in [row for row in self.running if row.finish is not None]:
            if row.finish != "error" and not self._prefix.publish_rest(row):
                break  # its copy can wait, the rows that decode should not
            self._drafting.release(row)
            kv = self.runner.kv
            (kv.scrub if row.finish == "error" else kv.release)(row.slot)
            self.roster.leave(row)
        self.roster.drop_ended_waiters()
        if not self.running:
            self.runner.kv.resize(0)

    def _measure(self, seconds: float, num_decoding: int, num_prompt: int) -> None:
        kind = (bool(num_decoding), bool(num_prompt))
        if self.pipelined and num_decoding and not num_prompt and kind == self._last_kind and self._flights:
            held = sum(row.num_kv for row in self.running)
            self._drafting.timed((1,) * num_decoding, held, seconds)
        if kind == self._last_kind:  # the first step after a change still pays for the one before
            decode_s = None if self.pipelined else self._decode_s
            self.pacer.observe(seconds, num_decoding, num_prompt, decode_s)
        self._last_kind = kind
