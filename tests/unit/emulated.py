"""GPU kernels of `mantou.models.ops.records_source` as plain C++, a fibre a thread. Knows no kernel."""

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
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
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

struct Fibre { ucontext_t context; jmp_buf place; int tid, turn; bool begun, done; char stack[1 << 16]; };
static Fibre* fibre;
static jmp_buf scheduler_place;  // a context switch asks the system for signals every time, a jump does not
static int block[3], num_blocks[3], waiting, num_fibres, generation;
static float slots[32][2][32];

static void pause() { if (!_setjmp(fibre->place)) _longjmp(scheduler_place, 1); }
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
static word fragments[32][32][6];
static bool votes[32][2][32];
static bool any_lane(bool x) {
  const int warp = fibre->tid / 32, turn = fibre->turn;
  fibre->turn ^= 1;
  votes[warp][turn][fibre->tid % 32] = x;
  pause();
  bool any = false;
  for (int i = 0; i < 32; i++) any |= votes[warp][turn][i];
  return any;
}
static word f16_bits(float x) { _Float16 h = x; uint16_t b; memcpy(&b, &h, 2); return b; }
static word f16_pair(float a, float b) { return f16_bits(a) | f16_bits(b) << 16; }
static float f16_low(word w) { uint16_t b = w; _Float16 h; memcpy(&h, &b, 2); return float(h); }
static word f16_minus(word a, word b) {
  return f16_pair(f16_low(a) - f16_low(b), f16_low(a >> 16) - f16_low(b >> 16));
}
static word bytes_of(word a, word b, int places) {
  word made = 0;
  for (int i = 0; i < 4; i++) {
    const int place = places >> (4 * i) & 7;
    made |= ((place < 4 ? a >> (8 * place) : b >> (8 * (place - 4))) & 255) << (8 * i);
  }
  return made;
}
// c [16, 8] += a [16, 16] b [16, 8]: lane 4 g + t holds rows g, g + 8 and columns 2 t, 2 t + 1 of c.
static void multiply(float& c0, float& c1, float& c2, float& c3, word a0, word a1, word a2, word a3, word b0, word b1) {
  const int warp = fibre->tid / 32, lane = fibre->tid % 32, g = lane / 4, t = lane % 4;
  const word own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fragments[lane][warp], own, sizeof own);
  pause();
  float* c[4] = {&c0, &c1, &c2, &c3};
  for (int part = 0; part < 4; part++) {
    for (int k = 0; k < 16; k++) {
      const int half = k / 8, place = k % 8 / 2, shift = 16 * (k % 2), n = 2 * t + part % 2;
      const word a = fragments[4 * g + place][warp][2 * half + part / 2];
      const word b = fragments[4 * n + place][warp][4 + half];
      *c[part] += f16_low(a >> shift) * f16_low(b >> shift);
    }
  }
  pause();
}
static float pow2(float x) { return exp2f(x); }
static float larger(float a, float b) { return a > b ? a : b; }
static float smaller(float a, float b) { return a < b ? a : b; }
static float root(float x) { return sqrtf(x); }
static float nearest(float x) { return nearbyintf(x); }
static float size_of(float x) { return fabsf(x); }
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
static void run_fibre() { one_thread(); fibre->done = true; _longjmp(scheduler_place, 1); }
static void go_on() {
  if (_setjmp(scheduler_place)) return;
  if (fibre->begun) _longjmp(fibre->place, 1);
  fibre->begun = true;
  setcontext(&fibre->context);
}
extern "C" void launch(void** given, int gx, int gy, int gz, int threads) {
  arguments = given;
  num_blocks[0] = gx; num_blocks[1] = gy; num_blocks[2] = gz;
  Fibre* fibres = (Fibre*)malloc(threads * sizeof(Fibre));
  for (int z = 0; z < gz; z++) for (int y = 0; y < gy; y++) for (int x = 0; x < gx; x++) {
    block[0] = x; block[1] = y; block[2] = z;
    num_fibres = threads; waiting = 0;
    for (int t = 0; t < threads; t++) {
      Fibre& f = fibres[t];
      f.tid = t; f.turn = 0; f.begun = f.done = false;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack; f.context.uc_stack.ss_size = sizeof f.stack; f.context.uc_link = nullptr;
      makecontext(&f.context, run_fibre, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int t = 0; t < threads; t++) {
        Fibre& f = fibres[t];
        if (f.done) continue;
        fibre = &f;
        go_on();
        left |= !f.done;
      }
    }
  }
  free(fibres);
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
