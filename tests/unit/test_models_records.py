"""Attention over packed KV in place: the GPU kernels' own source, run as C++, against unpacking and plain attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mantou.kv import records as kv_records
from mantou.kv.blocks import PAGEABLE
from mantou.kv.codecs import InRecords, Nothing, make_scheme
from mantou.kv.geometry import Geometry
from mantou.kv.layouts import FullRows, WindowRing
from mantou.kv.plan import LayerCodec
from mantou.kv.records import Place
from mantou.kv.shapes import LayerShape
from mantou.models.families import Family
from mantou.models.load import describe, family_module
from mantou.models.ops.in_place import InPlace, RecordAttention
from mantou.models.ops.records import RecordKernels, Records, Tuning
from mantou.models.ops.records_format import record_format
from mantou.models.runner import Runner
from mantou.protocols import Group, KVScheme
from tests.unit.emulated import HEADER, EmulatedKernel

PLAIN = mx.fast.scaled_dot_product_attention
Case = tuple[str, int, int, int, int, int, mx.Dtype]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> RecordKernels:
    make = partial(EmulatedKernel, tmp_path_factory.mktemp("kernels"))
    return RecordKernels(make, HEADER, tuning=Tuning(run=32, warps=2))


@pytest.fixture(scope="module")
def matrix_kernels(tmp_path_factory: pytest.TempPathFactory) -> RecordKernels:
    make = partial(EmulatedKernel, tmp_path_factory.mktemp("kernels"))
    return RecordKernels(make, HEADER, tuning=Tuning(run=32, mma=True, mma_warps=2))


@pytest.fixture(autouse=True)
def nothing_fetched() -> Iterator[None]:
    yield
    kv_records.set_fetched(None)


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def codec_of(scheme: str, group_size: int, shape: LayerShape) -> LayerCodec:
    return make_scheme(scheme, group_size=group_size).plan([shape]).codecs[0]


def records_of(
    kernels: RecordKernels, scheme: str, group_size: int, kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> tuple[Records, LayerCodec]:
    shape = LayerShape(0, "full", (kv_heads, head_dim), (kv_heads, head_dim), dtype.size)
    codec = codec_of(scheme, group_size, shape)
    form = record_format(codec, shape)
    assert form is not None
    return Records(codec.name, form, kernels), codec


def geometry_of(starts: Sequence[int], width: int) -> Geometry:
    return Geometry(Group(0, width, (width,) * len(starts)), starts)


def distance(one: mx.array, other: mx.array) -> float:
    """Largest difference, in units of the largest value."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    assert one.shape == other.shape
    return float(mx.abs(one - other).max() / mx.abs(other).max())


CASES = [
    # scheme, group, D, heads, KV heads, tokens a row, type
    ("8", 64, 128, 8, 2, 1, mx.bfloat16),
    ("8", 32, 64, 4, 2, 3, mx.float32),
    ("4", 64, 64, 2, 2, 8, mx.bfloat16),
    ("turbo", 64, 64, 4, 1, 1, mx.float32),
    ("turbo", 64, 512, 2, 1, 1, mx.float32),
    ("turbo-k4v2", 64, 64, 5, 1, 5, mx.float32),
]
MATRIX_CASES = [  # 8 query rows, 16, 2 x 8 of wide heads, more than 16; all orders of codes
    ("8", 64, 128, 8, 2, 1, mx.bfloat16),
    ("8", 64, 256, 4, 1, 3, mx.bfloat16),
    ("4", 32, 64, 7, 1, 2, mx.float16),
    ("4", 64, 64, 6, 1, 4, mx.bfloat16),
    ("turbo", 64, 128, 6, 2, 4, mx.bfloat16),
    ("turbo-k4v2", 64, 64, 2, 2, 1, mx.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_rows_in_place_get_what_unpacked_ones_get(kernels: RecordKernels, case: Case) -> None:
    check(kernels, case)


@pytest.mark.parametrize("case", MATRIX_CASES, ids=str)
def test_matrix_products_in_place_get_what_unpacked_rows_get(
    matrix_kernels: RecordKernels, case: Case
) -> None:
    check(matrix_kernels, case)


def check(kernels: RecordKernels, case: Case) -> None:
    """What lies beyond a row's own columns is not a number, and no row sees it."""
    scheme, group, head_dim, heads, kv_heads, width, dtype = case
    records, codec = records_of(kernels, scheme, group, kv_heads, head_dim, dtype)
    starts, span, scale = (70, 3), 80, head_dim**-0.5
    shape = (2, kv_heads, span, head_dim)
    k, v = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2, dtype=dtype)
    q = normal(2, heads, width, head_dim, seed=3, dtype=dtype)
    geometry = geometry_of(starts, width)
    buffer = records.pack_both(k, v)
    keys, values = records.fetch(buffer, Place(geometry, span), dtype)
    for ours, packing, x in ((keys, codec.keys, k), (values, codec.values, v)):
        theirs, x = packing.unpack(packing.pack(x), mx.float32), x.astype(mx.float32)
        ours = ours.astype(mx.float32)
        if dtype == mx.float32:
            assert distance(ours, theirs) < 1e-5, "the same codes"
        assert float(((ours - x) ** 2).mean()) < 1.05 * float(((theirs - x) ** 2).mean())
    want = PLAIN(
        *(x.astype(mx.float32) for x in (q, keys, values)), scale=scale, mask=geometry.causal_mask(span, 0)
    )
    ends = mx.array(starts)[:, None, None, None] + width
    poisoned = mx.where(mx.arange(span)[None, None, :, None] < ends, buffer, mx.array(0xFFFFFFFF, mx.uint32))
    place = Place(geometry_of(starts, width), span)
    got = records.attention(poisoned, place, q, scale, 0, None)
    assert got.dtype == dtype
    assert distance(got, want) < (1e-5 if dtype == mx.float32 else 1e-2)


def attend_both_ways(
    cache: Any, q: mx.array, k: mx.array, v: mx.array, **more: Any
) -> tuple[mx.array, mx.array, bool]:
    """A layer's step in place and with what it fetched, and whether the plain attention was called for the first."""
    mask = cache.make_mask(q.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    called: list[bool] = []

    def plain(*arrays: mx.array, **options: Any) -> mx.array:
        called.append(True)
        return PLAIN(*arrays, **options)

    got = RecordAttention(plain)(q, keys, values, scale=0.1, mask=mask, **more)
    return got, PLAIN(q, keys, values, scale=0.1, mask=mask, **more), bool(called)


def test_a_ring_that_wraps_is_read_in_place_with_its_window_and_sinks(kernels: RecordKernels) -> None:
    records, _ = records_of(kernels, "8", 64, 1, 64, mx.float32)
    layout = WindowRing(LayerCodec(records, Nothing()), 2, 10, 6)
    starts, sinks = [0, 4], normal(2, seed=9)
    for step, width in enumerate((3, 1, 3, 1, 3, 3, 3, 1, 3)):
        layout.begin(geometry_of(starts, width), max(starts) + width)
        k, v, q = (normal(2, h, width, 64, seed=4 * step + i) for i, h in enumerate((1, 1, 2)))
        got, want, was_plain = attend_both_ways(layout, q, k, v, sinks=sinks)
        assert not was_plain
        assert distance(got, want) < 1e-5
        starts = [start + width for start in starts]
    assert max(starts) > layout.size


def test_a_mask_or_keys_that_are_not_the_layers_own_take_the_plain_path(kernels: RecordKernels) -> None:
    records, _ = records_of(kernels, "8", 64, 1, 64, mx.float32)
    layout = FullRows(LayerCodec(records, Nothing()), 1)
    layout.begin(geometry_of([0], 4), 4)
    k, v, q = (normal(1, 1, 4, 64, seed=i) for i in range(3))
    keys, values = layout.update_and_fetch(k, v)
    called: list[Any] = []

    def plain(*arrays: mx.array, **options: Any) -> mx.array:
        called.append(options["mask"])
        return PLAIN(*arrays, **options)

    attend = RecordAttention(plain)
    attend(q, keys, values, scale=0.1, mask="causal")
    assert not called
    foreign = mx.tri(4, dtype=mx.float32) > 0
    for more in ({"mask": foreign}, {"mask": None}):  # nothing is hidden from any of four queries
        keys, values = layout.keys_and_values()
        attend(q, keys, values, scale=0.1, **more)
    keys, values = layout.keys_and_values()
    attend(q, keys + 0, values, scale=0.1, mask="causal")
    keys, values = layout.keys_and_values()
    attend(q.astype(mx.bfloat16), keys, values, scale=0.1, mask="causal")
    assert len(called) == 4


def test_nothing_holds_a_buffer_after_its_attention(kernels: RecordKernels) -> None:
    """A held buffer would be copied at the next write, all of it."""
    records, _ = records_of(kernels, "8", 64, 1, 64, mx.float32)
    layout = FullRows(LayerCodec(records, Nothing()), 1)
    layout.begin(geometry_of([0], 1), 1)
    k, v = (normal(1, 1, 1, 64, seed=i) for i in range(2))
    keys, values = layout.update_and_fetch(k, v)
    assert kv_records.take_fetched(k, values) is None
    assert kv_records.take_fetched(keys, values) is None, "another attention has run since"


def test_a_row_in_records_survives_a_store_and_a_move(kernels: RecordKernels) -> None:
    records, _ = records_of(kernels, "8", 64, 1, 64, mx.float32)
    layouts = [FullRows(LayerCodec(records, Nothing()), 2) for _ in range(2)]
    for number, layout in enumerate(layouts):
        layout.begin(geometry_of([0, 0], 4), 4)
        k, v = (normal(2, 1, 4, 64, seed=2 * number + i) for i in range(2))
        layout.update_and_fetch(k, v)
    source, target = layouts
    row = np.array(source.keys[0][1])
    target.fill(0, source.columns(1, 0, 4), (), 4)
    target.move(0, 1, 4)
    assert np.array_equal(np.array(target.keys[0]), [row, row])


@pytest.mark.parametrize(
    ("scheme", "more", "layout", "head_dim"),
    [
        ("8", {}, "full", 96),
        ("8", {}, "chunked", 64),
        ("off", {}, "full", 64),
        ("4", {"start": 32}, "full", 64),
    ],
)
def test_caches_that_no_kernel_reads_keep_their_codec(
    kernels: RecordKernels, scheme: str, more: dict[str, Any], layout: str, head_dim: int
) -> None:
    shape = LayerShape(0, layout, (2, head_dim), (2, head_dim), 2)
    plain = make_scheme(scheme, **more)
    made = InRecords(plain, InPlace(lambda: kernels).records)
    assert [c.name for c in made.plan([shape]).codecs] == [c.name for c in plain.plan([shape]).codecs]
    assert not isinstance(made.plan([shape]).codecs[0].keys, Records)


def test_rings_keep_their_records_where_full_rows_are_in_blocks(kernels: RecordKernels) -> None:
    shapes = [LayerShape(i, layout, (2, 64), (2, 64), 2) for i, layout in enumerate(("full", "window"))]
    made = InRecords(make_scheme("8"), InPlace(lambda: kernels).records, fetched=PAGEABLE)
    full, window = made.plan(shapes).codecs
    assert not isinstance(full.keys, Records)
    assert isinstance(window.keys, Records)


# ------------------------------------------------------------------ with a model
_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Width and real tokens of two rows: a prompt, decode, an idle row, a draft of which less is kept, a prompt's rest.
_STEPS = [(16, (16, 9)), (1, (1, 1)), (1, (1, 0)), (4, (4, 3)), (1, (1, 1)), (12, (12, 2)), (2, (2, 2))]


def logits_of(scheme: KVScheme) -> tuple[list[np.ndarray], Runner]:
    source = family_module("qwen3")
    mx.random.seed(0)
    module = source.Model(source.ModelArgs.from_dict(_CONFIG))
    mx.eval(module.parameters())
    runner = Runner(describe(module, _CONFIG, Family("qwen3", supported=True)), scheme, max_width=16)
    runner.kv.resize(2)
    found: list[np.ndarray] = []
    dice = np.random.default_rng(0)
    for width, counts in _STEPS:
        group = Group(0, width, counts)
        _, logits = runner.forward(group, [dice.integers(0, 256, n).tolist() for n in counts], None)
        found += [np.array(logits[row, :n]) for row, n in enumerate(counts) if n]
        runner.kv.commit(group, (2, 1) if width == 4 else counts)
        runner.wait()
    return found, runner


@pytest.mark.parametrize("scheme", ["8", "turbo"])
def test_a_model_over_records_gives_the_logits_of_the_codec(
    kernels: RecordKernels, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, runner = logits_of(make_scheme(scheme))
    counts = runner.plan.counts
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", PLAIN)
    attended: list[int] = []
    attention = Records.attention

    def counted(self: Records, *arguments: Any) -> mx.array:
        attended.append(1)
        return attention(self, *arguments)

    monkeypatch.setattr(Records, "attention", counted)
    in_place = InPlace(lambda: kernels)
    assert in_place.install() == []
    assert mx.fast.scaled_dot_product_attention is PLAIN, "nothing is stored in records yet"
    in_records = InRecords(make_scheme(scheme), in_place.records)
    in_records.plan(runner.plan.shapes)
    attended.clear()
    for _ in range(2):
        assert in_place.install() == []
    ours, runner = logits_of(in_records)
    assert len(attended) == 2 * 5, "both layers, in all steps but the two wide ones"
    assert max(float(np.abs(a - b).max()) for a, b in zip(ours, plain, strict=True)) < 1e-4
    assert runner.plan.counts == {f"{name} in place": count for name, count in counts.items()}
    assert runner.kv.nbytes == runner.plan.token_bytes() * 2 * 64, "two slots of 64 columns"


def test_kernels_that_do_not_compile_or_are_wrong_are_not_used_and_the_card_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", PLAIN)

    def refused(**made: Any) -> Any:
        def call(**arguments: Any) -> list[mx.array]:
            raise RuntimeError("no such instruction\nline 1")

        return call

    def wrong(**made: Any) -> Any:
        made["source"] = made["source"].replace("q_sum[r] += q_[r][i]", "q_sum[r] -= q_[r][i]")
        return EmulatedKernel(tmp_path, **made)

    shape = LayerShape(0, "full", (1, 64), (1, 64), 4)
    scheme = make_scheme("8")
    for make, reason in ((refused, "do not run here (no such instruction)"), (wrong, "are off by")):
        in_place = InPlace(partial(RecordKernels, make, HEADER, tuning=Tuning(run=32, warps=2)))
        codec = InRecords(scheme, in_place.records).plan([shape]).codecs[0]
        assert codec.name == "kv8"
        (note,) = in_place.install()
        assert reason in note
