"""One forward of a group of rows over the KV batch. Knows token ids, slots and positions; no requests, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.errors import ModelError
from mantou.kv.batch import KVBatch, no_masks
from mantou.kv.blocks import PAGEABLE
from mantou.kv.geometry import WriteRows, no_write_rows
from mantou.kv.pages import Pages
from mantou.kv.recurrent import RecurrentState
from mantou.models import paging, tape, taps
from mantou.models.compiled import MAX_WIDTH, WORTH_IT, CompiledSteps, in_one_form
from mantou.models.device import release_thread
from mantou.models.head import Selection, Vocabulary, install, vocabulary
from mantou.models.layouts import arrange, layout_names, make_layouts
from mantou.models.load import LoadedModel, arrays_cache
from mantou.models.paging import ReadBlocks
from mantou.protocols import Group, KVScheme

# Columns of a ring beyond its window. The place of a position in the ring decides the order in which attention sums it,
# so the size is the same for every usual chunk: equal requests give equal bits on servers with different chunks.
RING_SLACK = 512


# Rows, slots and widths that are run before the first request: one row with drafts, all slots, some slots.
_WARM = ((1, 1, (1, 2, 4, 8, 16)), (2, 2, (1, 2)), (2, 4, (1, 2)))


@cache
def _recurrent_class() -> type[RecurrentState]:
    # mamba's graph stores its state only in instances of mlx-lm's own class.
    return type("RecurrentState", (RecurrentState, arrays_cache()), {})


class Runner:
    """Owns the graph and its KV batch, whose rows share pools of `block` tokens a block where their layers can.

    `max_width` bounds the tokens a row may feed in one forward; attention over ragged rows reads a multiple of
    `span_step` columns; `compiles`: forwards of few tokens are compiled where that can be.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheme: KVScheme,
        *,
        max_width: int = 512,
        span_step: int = 1,
        ring_slack: int = RING_SLACK,
        write_rows: WriteRows = no_write_rows,
        block: int | None = None,
        read_blocks: ReadBlocks | None = None,
        compiles: bool = False,
    ) -> None:
        family, shapes = model.family, model.shapes
        self.model = model
        self.max_width = max_width
        self.span_step = span_step
        self.ragged_widths = family.ragged_widths
        self.ragged_offsets = family.ragged_offsets
        self.recurrent = "recurrent" in layout_names(shapes)
        self.plan = scheme.plan(shapes)
        self.ring_slack = max(max_width, ring_slack)
        self.block = block if layout_names(shapes).keys() & set(PAGEABLE) else None
        pages = Pages(self.block) if self.block else None
        self._read_blocks = read_blocks
        # A graph that needs one offset for all rows, or states, is built in every step.
        compiles = compiles and family.ragged_offsets and not self.recurrent and self.block is None
        self.kv = KVBatch(
            lambda num_slots: make_layouts(self.plan, num_slots, self.ring_slack, _recurrent_class(), pages),
            array_offsets=family.ragged_offsets,
            mask_axes=family.mask_axes,
            span_step=span_step,
            arrange=lambda layouts: arrange(shapes, layouts),
            write_rows=write_rows,
            pages=pages,
            masked=in_one_form if compiles else no_masks,
        )
        taps.remove(model.module)
        self._selection: Selection | None = install(model.module)
        self._taps: taps.Taps | None = None
        if self.recurrent:
            tape.install(model.module)
        self._hidden: mx.array | None = None  # of the last forward, while nobody took it
        self.compiled = CompiledSteps(self._forward, self.kv) if compiles else None

    def capture_hidden(self) -> None:
        """From now on `take_hidden` gives what each forward's vocabulary head saw. Raises ModelError if nobody can."""
        if self._selection is None:
            raise ModelError(
                f"This draft model reads hidden states, which {self.model.family.name} does not give; "
                "serve without it."
            )
        self._selection.capturing = True
        self._recompile()

    def _recompile(self) -> None:
        if self.compiled is not None:
            self.compiled.forget()

    @property
    def compiling(self) -> dict[str, Any] | None:
        """For how many shapes steps are compiled, and why none are any more; None on devices that build each."""
        if self.compiled is None:
            return None
        return {"shapes": self.compiled.num_compiled, "off": self.compiled.off}

    def vocabulary(self) -> Vocabulary:
        """The model's embedding and head, for drafters. Raises ModelError where they cannot be told apart."""
        found = None if self._selection is None else vocabulary(self.model.module, self._selection)
        if found is None:
            raise ModelError(
                f"This draft model shares the vocabulary head of its target, which {self.model.family.name} does not "
                "show; serve without it."
            )
        return found

    def tap(self, places: Sequence[int]) -> None:
        """From now on `take_hidden` gives what these layers gave, side by side. Raises ModelError if it cannot."""
        self._taps = taps.install(self.model.module, places)
        self._recompile()

    def take_hidden(self) -> mx.array | None:
        """[rows, width, D] of the last forward, lazily; None unless they are captured."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def take_captured(self) -> mx.array | None:
        """What the graph's last call left to capture; `take_hidden` gives that of the last forward."""
        if self._selection is None:
            return None
        hidden, self._selection.hidden = self._selection.hidden, None
        return hidden if self._taps is None or hidden is None else self._taps.take()

    def _forward(self, tokens: mx.array, index: mx.array | None) -> Sequence[mx.array]:
        """Logits of positions `index` int32[rows, K], or of all; and hidden states, if they are captured."""
        if self._selection is not None:
            self._selection.index = index
        try:
            logits = self.model.module(tokens, cache=self.kv.caches)
        finally:
            if self._selection is not None:
                self._selection.index = None
        if self._selection is None and index is not None:
            logits = mx.take_along_axis(logits, index[..., None], axis=1)
        hidden = self.take_captured()
        return [logits] if hidden is None else [logits, hidden]

    def forward(
        self,
        group: Group,
        tokens: Sequence[Sequence[int]] | mx.array,
        wanted: Sequence[Sequence[int]] | None,
        *,
        rewindable: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """Builds a forward. Returns (tokens int32[rows, width], logits [rows, K, V]).

        `tokens` are each row's tokens, or the device array int32[rows, 1] of the last draw. `wanted` names K positions
        of each row; None wants all (K = width). `rewindable`: rows may keep less than they feed. The KV holds the new
        tokens once `kv.commit` was called.
        """
        if not isinstance(tokens, mx.array):
            padded = np.zeros((len(tokens), group.width), np.int32)
            for row, known in enumerate(tokens):
                padded[row, : len(known)] = known
            tokens = mx.array(padded)
        self._begin(group, rewindable=rewindable)
        index = None
        if wanted is not None and group.width > 1:
            index = mx.array([list(columns) for columns in wanted], dtype=mx.int32)
        if index is None or self.compiled is None or index.shape[1] == 1 or group.width > MAX_WIDTH:
            return tokens, self._run(tokens, index)
        # A compiled shape for each number of drafted tokens would be too many: drafts project all positions.
        return tokens, mx.take_along_axis(self._run(tokens, None), index[..., None], axis=1)

    def _run(self, tokens: mx.array, index: mx.array | None) -> mx.array:
        logits, *hidden = (self.compiled or self._forward)(tokens, index)
        self._hidden = hidden[0] if hidden else None
        return logits

    def _begin(self, group: Group, *, rewindable: bool = False) -> None:
        if self.block:
            paging.install(self._read_blocks)
        self.kv.begin(group, rewindable=rewindable)

    def start(self, logits: mx.array) -> None:
        """Starts the device on a forward whose draw is not known yet. Does not wait."""
        mx.async_eval(logits)

    def launch(self, draw: Any | None) -> None:
        """Starts the device on the draw, if there is one, and on the KV. Does not wait."""
        mx.async_eval(draw.arrays() if draw is not None else [], self.kv.arrays())

    def wait(self) -> None:
        """Until the KV is computed."""
        mx.eval(self.kv.arrays())

    def replay(self, group: Group, tokens: mx.array, kept: Sequence[int]) -> None:
        """Runs a rejected verify forward again, so that recurrent layers hold `kept` tokens a row and no more."""
        width = group.width
        if (
            not self.ragged_widths
        ):  # such a group holds rows of one width, so the kept part is a group as well
            tokens, width = tokens[:, : max(kept)], max(kept)
        masked = Group(group.lo, width, tuple(kept))
        self._begin(masked)
        self.model.module(tokens, cache=self.kv.caches)
        self.kv.commit(masked, kept)

    def abort(self) -> None:
        self.kv.abort()

    def warm_up(self) -> Sequence[str]:
        """Runs what requests will, until it is compiled: the device's kernels are made now, not in the first of them.
        Leaves the KV empty. Returns what the ready card should say."""
        if self.compiled is None:
            return ()
        for rows, slots, widths in _WARM:
            self.kv.resize(slots)
            for width in (w for w in widths if w <= self.max_width):
                group = Group(0, width, (width,) * rows)
                for step in range(WORTH_IT + 2):
                    wanted = None if step else [[0]] * rows
                    _, logits = self.forward(group, [[0] * width] * rows, wanted)
                    mx.eval(mx.argmax(logits, axis=-1), self.kv.arrays())
                    self.kv.commit(group, [1] * rows)
        self._hidden = None
        self.kv.resize(0)
        return () if self.compiled.off is None else (f"steps are built one by one: {self.compiled.off}",)

    def close(self) -> None:
        """Frees graph and KV. The last thing on the thread that ran them."""
        self.kv.resize(0)
        self.compiled = None
        del self.model
        release_thread()
