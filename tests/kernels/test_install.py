"""CpuOps in real graphs: the logits of plain MLX, for many families, and equal bits with and without fused layers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mantou.kv.codecs import Affine, Native, Uniform
from mantou.kv.columns import Columns
from mantou.kv.geometry import no_write_rows
from mantou.models.families import Family
from mantou.models.load import describe, make_caches
from mantou.models.ops import cpu, fast, fused, modules
from mantou.models.ops.plain import PlainOps
from mantou.models.runner import Runner
from mantou.protocols import Group, KVCodec
from tests.compose import families

# Every kind of part at least once: head norms, biases, windows, sinks, experts, adapters of the graph's own, latent
# attention, gated delta and SSM layers, layer norms, weights that a graph reads or replaces.
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3n", "gpt2", "gpt_neox", "mixtral", "qwen3_moe",
    "gpt_oss", "mamba2", "falcon_h1", "kimi_linear", "qwen3_next", "deepseek_v3", "deepseek_v41", "minicpm3", "cohere",
    "phi3", "smollm3", "olmo2", "mimo", "baichuan_m1", "gemma4_text",
)  # fmt: skip
FUSED = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3_text": 4, "smollm3": 3}


@pytest.fixture(autouse=True)
def plain_mx_fast_afterwards() -> Iterator[None]:
    fast.restore_mx_fast()
    yield
    fast.restore_mx_fast()


def logits(model: Any) -> mx.array:
    tokens = mx.array([[5, 7, 9, 11, 3, 2, 8], [1, 2, 3, 4, 5, 6, 7]])
    cache = list(make_caches(model))
    first = model(tokens, cache=cache)
    y = mx.concatenate([first[:, -3:], model(tokens[:, :1], cache=cache)], axis=1)
    mx.eval(y)
    return y.astype(mx.float32)


def distance(a: mx.array, b: mx.array) -> float:
    return float(mx.max(mx.abs(a - b)) / mx.max(mx.abs(b)))


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_graphs(family: str) -> None:
    model = families.tiny(family)
    want = logits(model)
    notes = cpu.CpuOps(threads=2).install(model)
    assert not any("stay on plain" in note for note in notes)
    assert (
        sum(isinstance(m, fused.FusedLayer) for m in model.modules()) == FUSED.get(family, 0)
        or family not in FUSED
    )
    for blocks in {id(c): c for c, _ in _lists(model)}.values():
        fused_next = [isinstance(block, fused.FusedLayer) for block in blocks[1:]] + [False]
        for block, has_next in zip(blocks, fused_next, strict=True):
            assert not isinstance(block, fused.FusedLayer) or block.linked == has_next
    assert distance(logits(model), want) < 2e-5


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantised_graphs(bits: int) -> None:
    for family in ("llama", "qwen3_moe"):
        model = families.tiny(family)
        nn.quantize(
            model,
            32,
            bits,
            class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
        )
        want = logits(model)
        cpu.CpuOps(threads=2).install(model)
        assert distance(logits(model), want) < 1e-3


def test_other_quantisations_stay_with_mlx() -> None:
    model = families.tiny("llama")
    nn.quantize(model, 32, 4, mode="mxfp4")
    want = logits(model)
    notes = cpu.CpuOps(threads=2).install(model)
    assert any("stay on plain MLX" in note for note in notes)
    assert distance(logits(model), want) < 1e-5


def runs(model: Any, codec: Any, write_rows: Any = no_write_rows, **options: Any) -> list[np.ndarray]:
    """Ragged prompts, a chunk, single tokens, a rejected token and an idle row, through the engine's own row cache.

    Row 0 outgrows the ring of a window layer (window + 512 columns) in the second forward.
    """
    runner = Runner(
        describe(model, {}, Family("any", supported=True)),
        Uniform(codec),
        max_width=300,
        write_rows=write_rows,
        **options,
    )
    runner.kv.resize(3)
    generator = np.random.default_rng(0)
    out = []
    plan = [Group(0, 300, (300, 4, 0)), Group(0, 250, (250, 0, 5)), *[Group(0, 1, (1, 1, 1))] * 3, Group(1, 2, (2, 1)),
            *[Group(0, 1, (1, 0, 1))] * 30]  # fmt: skip
    for i, group in enumerate(plan):
        tokens = [generator.integers(0, 30, n).tolist() for n in group.num_tokens]
        _, y = runner.forward(group, tokens, None)
        runner.launch(None)
        # The third single step loses row 0's token, as a rejected draft would.
        kept = (0, 1, 1) if i == 4 else group.num_tokens
        runner.kv.commit(group, kept)
        out.extend(np.array(y[b, :n]) for b, n in enumerate(group.num_tokens) if n)
    runner.kv.check_integrity()
    return out


@pytest.mark.parametrize("codec", [Native(), Affine(8, 32), Affine(4, 32)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("family", sorted(FUSED))
def test_fused_layers_change_no_bit(family: str, codec: KVCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across a ring that wraps in the middle of a sequence, and over packed keys: a fused layer reads them where
    they lie, the block unpacks them first."""
    model, ops = families.tiny(family), cpu.CpuOps(threads=2)
    ops.install(model)
    lent, lend = [], Columns._loan

    def counted(*arguments: Any) -> Any:
        loan = lend(*arguments)
        lent.append(loan is not None)
        return loan

    monkeypatch.setattr(Columns, "_loan", counted)
    with_layers = runs(model, codec)
    assert lent == [True] * 36 * FUSED[family], "every layer of every forward"
    lent.clear()
    for owner, index in [(c, i) for c, i in _lists(model) if isinstance(c[i], fused.FusedLayer)]:
        owner[index] = owner[index]["block"]
    assert not any(isinstance(m, fused.FusedLayer) for m in model.modules())
    written = runs(model, codec, ops.write_rows)
    for plain in ({}, fast.PLAIN_QUANTISATION._asdict()):
        for name, function in plain.items():
            monkeypatch.setattr(mx, name, function)
        blocks = runs(model, codec)
        assert all(np.array_equal(a, b) for a, b in zip(with_layers, blocks, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(written, blocks, strict=True))
    assert not lent


@pytest.mark.parametrize("block", [None, 16])
def test_rows_hold_a_forward_that_nobody_launched(block: int | None) -> None:
    """The graph does not know that a fused layer writes into the row cache: whoever reads it next has to wait."""
    model, ops = families.tiny("llama"), cpu.CpuOps(threads=2)
    ops.install(model)

    def rows(launch: bool, readers: str) -> list[np.ndarray]:
        runner = Runner(
            describe(model, {}, Family("any", supported=True)),
            Uniform(Native()),
            write_rows=ops.write_rows,
            block=block,
        )
        kv = runner.kv
        kv.resize(2)
        for width in (40, 1, 3):
            group = Group(0, width, (width, width))
            runner.forward(group, [list(range(width))] * 2, None)
            if launch:
                mx.eval(kv.arrays())
            kv.commit(group, group.num_tokens)
        if readers == "moved":
            kv.swap(0, 1)
            kv.restore(1, kv.snapshot(0))
        elif readers == "aborted":
            runner.forward(Group(0, 1, (1, 1)), [[9], [9]], None)
            kv.abort()
        return [
            np.array(part) for slot in range(2) for layer in kv.layers for part in layer.columns(slot, 0, 44)
        ]

    for readers in ("columns", "moved", "aborted"):
        want, got = rows(True, readers), rows(False, readers)
        assert len(want) == 8 and all(part.any(axis=(0, 1, 3)).all() for part in want)
        assert all(map(np.array_equal, got, want))


def test_another_thread_may_ask_how_large_the_rows_are_while_a_forward_is_built() -> None:
    """`/stats` does. Only the model thread may launch anything."""
    model, ops = families.tiny("llama"), cpu.CpuOps(threads=2)
    ops.install(model)
    described = describe(model, {}, Family("any", supported=True))
    runner = Runner(described, Uniform(Native()), write_rows=ops.write_rows, block=16)
    runner.kv.resize(1)
    runner.forward(Group(0, 3, (3,)), [[1, 2, 3]], None)
    with ThreadPoolExecutor(1) as others:
        assert others.submit(lambda: runner.kv.nbytes).result() > 0
    runner.kv.abort()


@pytest.mark.parametrize("codec", [Native(), Affine(8, 32)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("family", [*sorted(FUSED), "qwen3_moe", "gpt_oss"])
def test_rows_in_blocks_change_no_bit(family: str, codec: KVCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a fused layer writes and reads them in place nor where attention alone does; and what attention
    reads in place is not fetched before."""
    model, ops = families.tiny(family), cpu.CpuOps(threads=2)
    ops.install(model)
    want = runs(model, codec, ops.write_rows)
    read: list[bool] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        found = ops.read_blocks(*arguments, **options)
        read.append(found is not None)
        return found

    paged = runs(model, codec, ops.write_rows, block=16, read_blocks=counted)
    assert all(np.array_equal(a, b) for a, b in zip(paged, want, strict=True))
    assert all(read)
    assert bool(read) == (family in ("qwen3_moe", "gpt_oss", "smollm3")), "where not all layers are fused"


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n", "gemma3_text", "mamba2", "gpt_oss"])
def test_ragged_rows_are_those_of_plain_mlx(family: str) -> None:
    """Layers that share another's keys, rings with sinks, states with masked steps: as without kernels."""
    model = families.tiny(family)
    want = runs(model, Native())
    ops = cpu.CpuOps(threads=2)
    ops.install(model)
    for ours, theirs in zip(runs(model, Native(), ops.write_rows), want, strict=True):
        assert distance(mx.array(ours), mx.array(theirs)) < 5e-5


def test_a_window_layer_does_wrap() -> None:
    """What the test above relies on: the ring of the tiny model is shorter than its longest row."""
    model = families.tiny("gemma3_text")
    assert all(getattr(c, "max_size", 0) + 512 < 550 for c in make_caches(model))


def _lists(model: nn.Module) -> Iterator[tuple[list[Any], int]]:
    for module in list(model.modules()):
        for child in module.values():
            if isinstance(child, list):
                yield from ((child, i) for i in range(len(child)))


def test_weights_stay_readable() -> None:
    for module in (nn.Linear(64, 48), nn.QuantizedLinear(64, 48, group_size=32, bits=4)):
        (packed,) = modules.pack([module])
        linear = modules.PackedLinear(module, packed, 2)
        want = module.weight
        if "scales" in module:
            want = mx.dequantize(module.weight, module.scales, module.biases, group_size=32, bits=4)
        assert mx.array_equal(linear.weight, want)
        linear.weight = want + 1
        assert distance(linear(mx.ones((2, 64))), mx.ones((2, 64)) @ (want + 1).T + module.bias) < 1e-6


def test_scales_that_were_widened_are_kept_short() -> None:
    layer = nn.QuantizedLinear(128, 64, group_size=32, bits=4)
    wide = modules.pack([layer])[0].nbytes
    layer.scales, layer.biases = (
        a.astype(mx.float16).astype(mx.float32) for a in (layer.scales, layer.biases)
    )
    assert modules.pack([layer])[0].nbytes < wide


def test_what_the_caller_asked_for() -> None:
    assert isinstance(cpu.cpu_ops(environ={}), cpu.CpuOps)
    off = cpu.cpu_ops(environ={"MANTOU_CPU_KERNELS": "0"})
    assert isinstance(off, PlainOps)
    assert "MANTOU_CPU_KERNELS=0" in off.install(None)[0]


def test_a_failed_self_test_means_plain_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    from mantou.models.ops.extension import kernels
    from mantou.models.ops.self_test import self_test

    assert self_test() is None
    monkeypatch.setattr(kernels, "rms_norm", lambda x, weight, eps: x)
    reason = self_test()
    assert reason is not None and reason.startswith("rms_norm")
    monkeypatch.setattr(cpu, "_verdict", [])
    ops = cpu.cpu_ops(environ={})
    assert isinstance(ops, PlainOps)
    assert "self-test failed" in ops.install(None)[0]


def test_mx_fast_keeps_other_calls() -> None:
    x = mx.random.normal((2, 3, 4, 32))
    want = mx.fast.rms_norm(x, None, 1e-5)
    whole = mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0)
    fast.patch_mx_fast()
    stream = mx.default_stream(mx.cpu)
    assert mx.array_equal(mx.fast.rms_norm(x, None, 1e-5, stream=stream), want)
    assert mx.array_equal(mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, stream=stream), whole)
    with pytest.raises(ValueError, match="mask"):
        mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask="sliding")
