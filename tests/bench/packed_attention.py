"""`python -m tests.bench.packed_attention --out DIR`: attention over packed KV on a GPU, against plain MLX.

Part 1 compares the kernels with the oracle, spread over processes (compiling takes seconds a kernel, and MLX keeps the
results on disk). Part 2 times one layer's decode attention: native, unpacked, in place, and kernel variants. Part 3
decodes with a random Qwen3-4B over the engine's rows; `--only starter` does with the starter, on CPUs too. Every result
is printed as it comes and kept in DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from mantou.config import STARTER
from mantou.kv.codecs import InRecords, make_scheme
from mantou.kv.geometry import Geometry
from mantou.kv.plan import LayerCodec
from mantou.kv.records import Place
from mantou.kv.shapes import LayerShape
from mantou.models.device import this_device
from mantou.models.families import Family
from mantou.models.hub import obtain
from mantou.models.load import describe, family_module, load
from mantou.models.ops import device_ops
from mantou.models.ops.cuda import FoldedAttention
from mantou.models.ops.records import (
    RecordKernels,
    Records,
    Tuning,
    cuda_kernels,
    metal_kernels,
)
from mantou.models.ops.records_format import record_format
from mantou.models.runner import Runner
from mantou.progress import ProgressBoard
from mantou.protocols import Group, KVScheme

SCHEMES = ("8", "4", "turbo", "turbo-k4v2")
VARIANTS = {
    "base": Tuning(mma=True, run=512),
    "run 256": Tuning(mma=True, run=256),
    "run 1024": Tuning(mma=True, run=1024),
    "run 2048": Tuning(mma=True, run=2048),
    "warps 2": Tuning(mma=True, run=512, mma_warps=2),
    "warps 8": Tuning(mma=True, run=512, mma_warps=8),
    "warps 2, run 256": Tuning(mma=True, run=256, mma_warps=2),
    "warps 8, run 1024": Tuning(mma=True, run=1024, mma_warps=8),
    "no mma": Tuning(run=512, warps=4, dims=8),
    "no mma, run 1024": Tuning(run=1024, warps=4, dims=8),
}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_began = time.monotonic()


def say(*words: Any) -> None:
    print(f"[{time.monotonic() - _began:6.1f}]", *words, flush=True)


@contextlib.contextmanager
def guarded(what: str) -> Generator[None]:
    """Prints what goes wrong in full and goes on: a run on a lent machine must not end at its first fault."""
    try:
        yield
    except Exception:  # noqa: BLE001 (whatever it is, it is printed)
        say("FAILED", what)
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()


def kernels_for(tuning: Tuning) -> RecordKernels:
    return (metal_kernels if this_device().kind == "metal" else cuda_kernels)(tuning)


# ------------------------------------------------------------------ one layer
@dataclass(frozen=True)
class Case:
    scheme: str = "8"
    group_size: int = 64
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    width: int = 1
    starts: tuple[int, ...] = (1000, 3, 517)
    dtype: mx.Dtype = mx.bfloat16
    variant: str = "base"
    window: int = 0
    sinks: bool = False

    def __str__(self) -> str:
        heads = f"heads {self.heads}/{self.kv_heads} x {self.head_dim}"
        more = f" window {self.window}" * bool(self.window) + " sinks" * self.sinks
        dtype = str(self.dtype).rsplit(".", 1)[-1]
        name = f"{self.scheme} g{self.group_size} {heads} T={self.width} {dtype} [{self.variant}]{more}"
        return f"{name} starts {self.starts}"


def codec_of(scheme: str, group_size: int, shape: LayerShape) -> LayerCodec:
    return make_scheme(scheme, group_size=group_size).plan([shape]).codecs[0]


def records_of(case: Case) -> tuple[Records, LayerCodec]:
    heads = (case.kv_heads, case.head_dim)
    shape = LayerShape(0, "full", heads, heads, case.dtype.size)
    codec = codec_of(case.scheme, case.group_size, shape)
    form = record_format(codec, shape)
    assert form is not None, case
    return Records(codec.name, form, kernels_for(VARIANTS[case.variant])), codec


def compare(case: Case) -> bool:
    """Whether the kernels agree with unpacking and plain attention in float32, and their packing with the codec's."""
    records, codec = records_of(case)
    batch, span = len(case.starts), max(case.starts) + case.width
    mx.random.seed(1)
    k, v = (mx.random.normal((batch, case.kv_heads, span, case.head_dim)).astype(case.dtype) for _ in "kv")
    q = mx.random.normal((batch, case.heads, case.width, case.head_dim)).astype(case.dtype)
    packed = records.pack_both(k, v)
    geometry = Geometry(Group(0, case.width, (case.width,) * batch), case.starts)
    place = Place(geometry, span)
    keys, values = (x.astype(mx.float32) for x in records.fetch(packed, place, case.dtype))
    kept = [c.unpack(c.pack(x), mx.float32) for c, x in ((codec.keys, k), (codec.values, v))]
    worse = [
        float(mx.sqrt(mx.mean((ours - x.astype(mx.float32)) ** 2)))
        / float(mx.sqrt(mx.mean((theirs - x.astype(mx.float32)) ** 2)))
        for ours, theirs, x in zip((keys, values), kept, (k, v), strict=True)
    ]
    sinks = mx.random.normal((case.heads,)) if case.sinks else None
    scale = case.head_dim**-0.5
    got = records.attention(packed, place, q, scale, case.window, sinks).astype(mx.float32)
    mask = geometry.causal_mask(span, case.window)
    scores = mx.repeat(keys, case.heads // case.kv_heads, 1) @ (q.astype(mx.float32) * scale).swapaxes(-1, -2)
    scores = mx.where(mask, scores.swapaxes(-1, -2), -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = mx.softmax(mx.concatenate([column, scores], -1), axis=-1)[..., 1:]
    else:
        weights = mx.softmax(scores, axis=-1)
    want = weights @ mx.repeat(values, case.heads // case.kv_heads, 1)
    error = float(mx.abs(got - want).max()) / float(mx.abs(want).max())
    good = error < (2e-2 if case.dtype != mx.float32 else 1e-3) and max(worse) < 1.05
    say(
        "ok " if good else "BAD",
        case,
        f"error {error:.1e}",
        f"packing error, of the codec's: {worse[0]:.3f} {worse[1]:.3f}",
    )
    return good


def correctness() -> list[Case]:
    plain = Case()
    cases = [replace(plain, scheme=s, width=w) for s in SCHEMES for w in (1, 4, 8)]
    cases += [replace(plain, scheme=s, group_size=32) for s in ("8", "4")]
    cases += [replace(plain, scheme=s, head_dim=d) for s in ("8", "turbo") for d in (64, 256, 512)]
    cases += [replace(plain, heads=h, kv_heads=n) for h, n in ((8, 8), (28, 4), (16, 2), (6, 3))]
    cases += [replace(plain, scheme=s, dtype=d) for s in ("8", "turbo") for d in (mx.float16, mx.float32)]
    cases += [replace(plain, window=100), replace(plain, sinks=True, head_dim=64), replace(plain, width=3)]
    cases += [
        replace(plain, scheme=s, variant=name) for s in ("8", "turbo") for name in VARIANTS if name != "base"
    ]
    return cases


def check_part(part: int, parts: int) -> None:
    for case in correctness()[part::parts]:
        with guarded(str(case)):
            compare(case)


def check_all(parts: int, limit: float) -> None:
    """All cases, each process compiling its own share."""
    command = [sys.executable, "-m", "tests.bench.packed_attention", "--part"]
    workers = [
        subprocess.Popen(
            [*command, f"{i}/{parts}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(parts)
    ]
    end = time.monotonic() + limit
    for worker in workers:
        try:
            out, _ = worker.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            worker.kill()
            out, _ = worker.communicate()
            out += "\nKILLED: out of time\n"
        print(out, end="", flush=True)


# ------------------------------------------------------------------ time of one layer
def milliseconds(call: Callable[[int], mx.array], repeats: int) -> float:
    """Of one call among many in a row, which find their inputs outside the caches."""
    mx.eval([call(i) for i in range(2)])
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        mx.eval([call(i) for i in range(repeats)])
        mx.synchronize()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best * 1e3


@dataclass
class Layer:
    """Random keys and values of one layer in several copies, so that the second-level cache holds none of them."""

    rows: int
    columns: int
    ragged: bool = False

    def __post_init__(self) -> None:
        native_bytes = self.rows * self.columns * 8 * 128 * 2 * 2
        self.copies = max(1, min(12, int(300e6 // native_bytes) + 1))
        self.repeats = max(4, min(24, int(6e9 // native_bytes)))
        shape = (self.rows, 8, self.columns, 128)
        self.keys = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(self.copies)]
        self.values = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(self.copies)]
        self.q = mx.random.normal((self.rows, 32, 1, 128), dtype=mx.bfloat16)
        mx.eval(self.keys, self.values, self.q)
        starts = [self.columns - 1 - (17 * i if self.ragged else 0) for i in range(self.rows)]
        self.geometry = Geometry(Group(0, 1, (1,) * self.rows), starts)
        self.place = Place(self.geometry, self.columns)

    def native(self, plain: Callable[..., mx.array]) -> float:
        mask = self.geometry.causal_mask(self.columns, 0) if self.ragged else None
        attend = FoldedAttention(plain) if self.ragged else plain

        def call(i: int) -> mx.array:
            at = i % self.copies
            return attend(self.q, self.keys[at], self.values[at], scale=0.09, mask=mask)

        return milliseconds(call, self.repeats)

    def unpacked(self, plain: Callable[..., mx.array], scheme: str) -> float:
        heads = (8, 128)
        codec = codec_of(scheme, 64, LayerShape(0, "full", heads, heads, 2))
        parts = [
            (codec.keys.pack(k), codec.values.pack(v)) for k, v in zip(self.keys, self.values, strict=True)
        ]
        mx.eval(parts)

        def call(i: int) -> mx.array:
            keys, values = parts[i % self.copies]
            keys, values = codec.keys.unpack(keys, mx.bfloat16), codec.values.unpack(values, mx.bfloat16)
            return plain(self.q, keys, values, scale=0.09)

        return milliseconds(call, max(2, self.repeats // 4))

    def in_place(self, scheme: str, variant: str, width: int = 1) -> float:
        records, _ = records_of(Case(scheme=scheme, variant=variant))
        packed = [records.pack_both(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        q = self.q if width == 1 else mx.random.normal((self.rows, 32, width, 128), dtype=mx.bfloat16)
        place = self.place
        if width > 1:
            starts = [s - width + 1 for s in self.geometry.starts]
            place = Place(Geometry(Group(0, width, (width,) * self.rows), starts), self.columns)
        mx.eval(packed, q)
        return milliseconds(
            lambda i: records.attention(packed[i % self.copies], place, q, 0.09, 0, None), self.repeats
        )


def time_layers(
    plain: Callable[..., mx.array], sizes: Sequence[tuple[int, int]], kept: dict[str, Any]
) -> None:
    say(
        "us a layer | rows, columns | native (None), ragged fold | unpack + SDPA of each | in place of each |",
        *SCHEMES,
    )
    for rows, columns in sizes:
        with guarded(f"{rows} rows of {columns}"):
            layer = Layer(rows, columns)
            row: dict[str, Any] = {
                "native": layer.native(plain),
                "ragged": Layer(rows, columns, True).native(plain),
            }
            for scheme in SCHEMES:
                with guarded(f"in place {scheme}"):
                    row[f"in place {scheme}"] = layer.in_place(scheme, "base")
            if rows in (1, 8):
                for scheme in ("8", "turbo"):
                    with guarded(f"unpack {scheme}"):
                        row[f"unpack {scheme}"] = layer.unpacked(plain, scheme)
                for width in (4, 8):
                    with guarded(f"T={width}"):
                        row[f"in place 8, T={width}"] = layer.in_place("8", "base", width)
            kept[f"{rows}x{columns}"] = row
            say(rows, columns, {name: round(ms * 1e3, 1) for name, ms in row.items()})
        mx.clear_cache()


def time_variants(sizes: Sequence[tuple[int, int]], kept: dict[str, Any]) -> None:
    for rows, columns in sizes:
        layer = Layer(rows, columns)
        for scheme in ("8", "turbo"):
            found: dict[str, float] = {}
            for name in VARIANTS:
                with guarded(f"variant {name}"):
                    found[name] = layer.in_place(scheme, name)
            kept[f"{scheme} {rows}x{columns}"] = found
            say("variants", scheme, rows, columns, {name: round(ms * 1e3, 1) for name, ms in found.items()})
        mx.clear_cache()


# ------------------------------------------------------------------ decoding with a model
def random_model(config: dict[str, Any]) -> Any:
    source = family_module("qwen3")
    mx.random.seed(0)
    module = source.Model(source.ModelArgs.from_dict(config))
    module.set_dtype(mx.bfloat16)
    module.eval()
    mx.eval(module.parameters())
    return describe(module, config, Family("qwen3", supported=True))


class Decoding:
    """Rows that hold `lengths` tokens and decode as the engine does: ahead of the device, or in turn on a CPU."""

    def __init__(
        self, model: Any, scheme: KVScheme, lengths: Sequence[int], chunk: int = 512, **options: Any
    ) -> None:
        options = options or {"span_step": 256, "compiles": True}
        self.runner = Runner(model, scheme, max_width=chunk, **options)
        self.rows = len(lengths)
        self._in_turn = this_device().on_cpu
        self.runner.kv.resize(self.rows)
        vocabulary = model.config["vocab_size"]
        for lo in range(0, max(lengths), chunk):
            counts = tuple(max(0, min(chunk, length - lo)) for length in lengths)
            group = Group(0, chunk, counts)
            tokens = [[(31 * i + 7 * j) % vocabulary for i in range(n)] for j, n in enumerate(counts)]
            _, logits = self.runner.forward(group, tokens, [[max(n - 1, 0)] for n in counts])
            mx.eval(logits)
            self.runner.kv.commit(group, counts)
            self.runner.wait()
        self._fed = mx.zeros((self.rows, 1), mx.int32)
        self._last: mx.array | None = None
        self.times: list[float] = []
        self.built: list[float] = []

    def step(self) -> None:
        group, ones = Group(0, 1, (1,) * self.rows), (1,) * self.rows
        began = time.perf_counter()
        _, logits = self.runner.forward(group, self._fed, None)
        self._fed = mx.argmax(logits, axis=-1).astype(mx.int32)
        self.built.append(time.perf_counter() - began)
        if self._in_turn:
            mx.eval(self._fed, self.runner.kv.arrays())
        else:
            mx.async_eval(self._fed, self.runner.kv.arrays())
        self.runner.kv.commit(group, ones)
        if self._last is not None:
            self._last.tolist()
        self._last = self._fed
        self.times.append(time.perf_counter() - began)

    def steps(self, number: int, *, warm: int) -> None:
        """`number` steps of which the first `warm` do not count."""
        kept = len(self.times)
        for _ in range(number):
            self.step()
        del self.times[kept : kept + warm], self.built[kept : kept + warm]

    def found(self) -> dict[str, float]:
        ms = median(self.times) * 1e3
        return {
            "rows": self.rows,
            "ms": ms,
            "build_ms": median(self.built) * 1e3,
            "tokens_per_second": self.rows / ms * 1e3,
            "kv_gb": self.runner.kv.nbytes / 1e9,
        }


def side_by_side(
    model: Any,
    schemes: Mapping[str, KVScheme],
    lengths: Mapping[str, Sequence[int]],
    rounds: int,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Decodes with each scheme in turn, a few steps at a time: a host of many tenants is now quick and now slow."""
    all_ = {name: Decoding(model, schemes[name], rows, **options) for name, rows in lengths.items()}
    for decoding in all_.values():
        decoding.steps(24, warm=24)
    for _ in range(rounds):
        for decoding in all_.values():
            decoding.steps(11, warm=3)
    return {name: decoding.found() for name, decoding in all_.items()}


def budget_rows(model: Any, scheme: KVScheme, length: int, gigabytes: float = 4.0) -> int:
    return max(1, int(gigabytes * 1e9 // scheme.plan(model.shapes).row_bytes(length)))


def time_model(config: dict[str, Any], length: int, rounds: int, limit: float, kept: dict[str, Any]) -> None:
    say("a random model of", config["num_hidden_layers"], "layers")
    model = random_model(config)
    ops = device_ops(this_device().kind)
    schemes: dict[str, KVScheme] = {"native": make_scheme("off")}
    for name in SCHEMES:
        schemes[name] = InRecords(make_scheme(name), ops.records)
        schemes[name].plan(model.shapes)
    schemes["8 unpacked"] = make_scheme("8")
    say("notes:", ops.install(model.module))
    rows = {name: budget_rows(model, scheme, length + 128) for name, scheme in schemes.items()}

    def ragged(number: int) -> list[int]:
        return [length - 37 * i for i in range(number)]

    two, all_ = ("native", "8"), ("native", "8", "turbo", "4", "turbo-k4v2")
    jobs: list[tuple[str, dict[str, list[int]]]] = [
        ("8 ragged rows", {name: ragged(8) for name in (*two, "turbo")}),
        ("1 row", {name: [length] for name in (*two, "turbo", "8 unpacked")}),
        ("8 rows of one length", {name: [length] * 8 for name in two}),
        ("ragged rows of 4 GB", {name: ragged(rows[name]) for name in all_}),
        ("rows of 4 GB of one length", {name: [length] * rows[name] for name in all_}),
        ("8 ragged rows, again", {name: ragged(8) for name in (*two, "turbo")}),
        ("1 row, again", {name: [length] for name in (*two, "turbo")}),
    ]
    for number, (what, lengths) in enumerate(jobs):
        if time.monotonic() - _began > limit:
            say("out of time:", len(jobs) - number, "left out")
            break
        with guarded(what):
            kept[what] = side_by_side(model, schemes, lengths, rounds)
            native = kept[what]["native"]["tokens_per_second"]
            for name, found in kept[what].items():
                share = found["tokens_per_second"] / native
                say(f"{what}, {name}: {share:.2f}x", {k: round(value, 3) for k, value in found.items()})
        mx.clear_cache()


def time_starter(length: int, rounds: int, kept: dict[str, Any]) -> None:
    """A real model on whatever device this is: how fast rows of `length` tokens decode, by codec."""
    board = ProgressBoard()
    device = this_device()
    model = load(obtain(STARTER, revision=None, cache_dir=None, board=board))
    ops = device_ops(device.kind)
    say(device.name, "notes:", ops.install(model.module))
    schemes = {name: InRecords(make_scheme(name), ops.records) for name in ("off", "8", "4", "turbo")}
    options = {"span_step": 1, "write_rows": ops.write_rows} if device.on_cpu else {}
    for what, lengths in (("1 row", [length]), ("4 ragged rows", [length - 37 * i for i in range(4)])):
        found = side_by_side(model, schemes, dict.fromkeys(schemes, lengths), rounds, **options)
        kept[what] = found
        for name, one in found.items():
            share = one["tokens_per_second"] / found["off"]["tokens_per_second"]
            say(f"{what}, {name}: {share:.2f}x", {k: round(value, 3) for k, value in one.items()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.packed_attention", description=__doc__)
    parser.add_argument("--part", help="I/N: only this share of the comparisons")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=float, default=140, help="seconds after which no decode is begun")
    parser.add_argument("--rounds", type=int, default=8, help="of a decode: 8 steps each")
    parser.add_argument("--only", default="check,variants,layers,model")
    args = parser.parse_args(argv)
    if args.part:
        share = args.part.split("/")
        check_part(int(share[0]), int(share[1]))
        return 0
    results: dict[str, Any] = {"check": {}, "variants": {}, "layers": {}, "model": {}, "starter": {}}
    plain = mx.fast.scaled_dot_product_attention
    sizes = [(rows, columns) for columns in (4096, 1024, 16384) for rows in (1, 4, 8, 16, 32)]
    parts: dict[str, Callable[[], None]] = {
        "check": lambda: check_all(args.processes, 60),
        "variants": lambda: time_variants(
            [(1, 4096), (8, 4096), (32, 4096), (1, 16384)], results["variants"]
        ),
        "layers": lambda: time_layers(plain, sizes, results["layers"]),
        "starter": lambda: time_starter(4096, args.rounds, results["starter"]),
        "model": lambda: time_model(QWEN, 4096, args.rounds, args.limit, results["model"]),
    }
    for name in args.only.split(","):
        say("==", name)
        with guarded(name):
            parts[name]()
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "packed_attention.json").write_text(json.dumps(results, indent=1), "utf-8")
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
