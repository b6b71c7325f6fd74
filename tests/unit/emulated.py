"""GPU kernels of `mantou.models.ops.records_source` as plain C++: threads are fibres that meet at exchanges and barriers."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

HEADER = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
typedef unsigned int word;
#define FN static inline
#define DEVICE
#define PRIVATE
#define SHARED static
#define UNROLL
#define TID fibre->tid
#define GX block[0]
#define GY block[1]
#define GZ block[2]
#define NUM_GX num_blocks[0]
#define BARRIER() meet()
#define EXCHANGE(x, mask) exchange(x, mask)

struct Fibre { ucontext_t context; int tid, turn; bool done; char stack[1 << 17]; };
static Fibre* fibre;
static ucontext_t scheduler;
static int block[3], num_blocks[3], waiting, num_fibres, generation;
static float slots[32][2][32];

static void pause() { swapcontext(&fibre->context, &scheduler); }
static void meet() {
  const int mine = generation;
  if (++waiting == num_fibres) { waiting = 0; generation++; }
  while (generation == mine) pause();
}
static float exchange(float x, int mask) {
  const int warp = fibre->tid / 32, lane = fibre->tid % 32, turn = fibre->turn;
  fibre->turn ^= 1;
  slots[warp][turn][lane] = x;
  pause();
  return slots[warp][turn][lane ^ mask];
}
static float pow2(float x) { return std::exp2(x); }
static float larger(float a, float b) { return a > b ? a : b; }
static float smaller(float a, float b) { return a < b ? a : b; }
static float root(float x) { return std::sqrt(x); }
static float nearest(float x) { return std::nearbyint(x); }
static float size_of(float x) { return std::fabs(x); }
static word bits_of(float x) { word w; memcpy(&w, &x, 4); return w; }
static float float_of(word w) { float x; memcpy(&x, &w, 4); return x; }
struct bf16 {
  uint16_t bits;
  bf16() : bits(0) {}
  explicit bf16(float x) { word w = bits_of(x); bits = uint16_t((w + 0x7fff + ((w >> 16) & 1)) >> 16); }
  operator float() const { return float_of(word(bits) << 16); }
};
static word half_bits(bf16 x) { return x.bits; }
static word half_bits(_Float16 x) { uint16_t b; memcpy(&b, &x, 2); return b; }
static word half_bits(float) { return 0; }
static float half_value(word w, bf16) { return float_of(w << 16); }
static float half_value(word w, _Float16) { uint16_t b = w; _Float16 x; memcpy(&x, &b, 2); return float(x); }
static float half_value(word, float) { return 0; }
static float byte_value(word w, int i) { return float((w >> (8 * i)) & 255); }
static void load2(const word* at, word* w) { memcpy(w, at, 8); }
static void load4(const word* at, word* w) {
  if (uintptr_t(at) % 16) __builtin_trap();  // as a GPU would
  memcpy(w, at, 16);
}
"""

_LAUNCH = r"""
static void** arguments;
static void one_thread();
static void run_fibre() { one_thread(); fibre->done = true; swapcontext(&fibre->context, &scheduler); }
extern "C" void launch(void** given, int gx, int gy, int gz, int threads) {
  arguments = given;
  num_blocks[0] = gx; num_blocks[1] = gy; num_blocks[2] = gz;
  std::vector<Fibre> fibres(threads);
  for (int z = 0; z < gz; z++) for (int y = 0; y < gy; y++) for (int x = 0; x < gx; x++) {
    block[0] = x; block[1] = y; block[2] = z;
    num_fibres = threads; waiting = 0;
    for (int t = 0; t < threads; t++) {
      Fibre& f = fibres[t];
      f.tid = t; f.turn = 0; f.done = false;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack; f.context.uc_stack.ss_size = sizeof f.stack; f.context.uc_link = nullptr;
      makecontext(&f.context, run_fibre, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (Fibre& f : fibres) if (!f.done) { fibre = &f; swapcontext(&scheduler, &f.context); left |= !f.done; }
    }
  }
}
"""

_C_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bf16",
    mx.float16: "_Float16",
    mx.int32: "int",
    mx.uint32: "word",
}


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"typedef {_C_TYPES[value]} {name};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {int(value)};"


class EmulatedKernel:
    """Called as a kernel of `mx.fast`. One shared library for each set of template arguments, kept in `folder`."""

    def __init__(self, folder: Path, **made: Any) -> None:
        self.folder = folder
        self.inputs, self.outputs = made["input_names"], made["output_names"]
        self.body, self.header = made["source"], made["header"]
        self._built: dict[str, Any] = {}

    def _source(self, inputs: Sequence[mx.array], dtypes: Sequence[mx.Dtype], template: Any) -> str:
        lines, at = [self.header, _LAUNCH, "static void one_thread() {"], 0
        for name, array in zip(self.inputs, inputs, strict=True):
            lines.append(
                f"const {_C_TYPES[array.dtype]}* {name} = (const {_C_TYPES[array.dtype]}*)arguments[{at}];"
            )
            lines.append(f"const int* {name}_shape = (const int*)arguments[{at + 1}];")
            lines.append(f"const long* {name}_strides = (const long*)arguments[{at + 2}];")
            at += 3
        for name, dtype in zip(self.outputs, dtypes, strict=True):
            lines.append(f"{_C_TYPES[dtype]}* {name} = ({_C_TYPES[dtype]}*)arguments[{at}];")
            at += 1
        lines += [_constant(name, value) for name, value in template]
        return "\n".join([*lines, self.body, "}"])

    def _library(self, text: str) -> Any:
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        if name not in self._built:
            library = self.folder / f"{name}.so"
            if not library.exists():
                path = self.folder / f"{name}.cpp"
                path.write_text(text, "utf-8")
                command = [
                    "g++",
                    "-std=c++17",
                    "-O1",
                    "-w",
                    "-shared",
                    "-fPIC",
                    str(path),
                    "-o",
                    str(library),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert not done.returncode, done.stderr[:3000]
            self._built[name] = ctypes.CDLL(str(library))
        return self._built[name]

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Any,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        held: list[np.ndarray] = []
        for array in inputs:
            data = _numpy(array)
            strides = np.array([s // data.itemsize for s in data.strides], np.int64)
            held += [data, np.array(array.shape, np.int32), strides]
        outs = [
            np.full(shape, 0xA5, _NUMPY[dtype])
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = (ctypes.c_void_p * (len(held) + len(outs)))(*[a.ctypes.data for a in (*held, *outs)])
        blocks = [-(-total // size) for total, size in zip(grid, threadgroup, strict=True)]
        self._library(self._source(inputs, output_dtypes, template)).launch(pointers, *blocks, threadgroup[0])
        made = zip(outs, output_dtypes, strict=True)
        return [mx.array(out).view(dtype) if dtype == mx.bfloat16 else mx.array(out) for out, dtype in made]


_NUMPY = {
    mx.float32: np.float32,
    mx.bfloat16: np.uint16,
    mx.float16: np.float16,
    mx.uint32: np.uint32,
    mx.int32: np.int32,
}


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
