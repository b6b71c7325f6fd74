// Matrix products on packed weights: activations prepared in tiles of 16 rows, 16-row weight blocks shared among the
// pool's threads, prologue and epilogue fused. Knows no MLX.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace mantou {

struct LinearCall {
  const Packed* weights = nullptr;
  const void* x = nullptr;  // [num_rows or more, k]
  Scalar x_type = Scalar::f32;
  int num_rows = 0;
  int planes = 2;  // 2 = 16-bit activations, 1 = 8-bit; dense weights always take f32

  // Prologue: RMS norm of every input row.
  const float* norm = nullptr;
  float norm_eps = 0;

  // Mixture of experts: output row i is x[source[i]] times expert[i]; null = row i and expert 0.
  const int32_t* source = nullptr;
  const int32_t* expert = nullptr;

  // Epilogue, in this order. Each step rounds to `out_type`, as the separate operations would.
  const float* bias = nullptr;  // [experts, rows]
  bool gated = false;           // blocks alternate gate and up; the output is gate(g) * u, half as wide
  bool activated = false;       // gate() of every output, of weights that are not gated
  Gate gate = Gate::silu;
  const void* residual = nullptr;  // [num_rows, width], out_type; may be `out`

  void* out = nullptr;  // [num_rows, width]
  Scalar out_type = Scalar::f32;
};

// With Hands::own it is part of a job of the pool; the bits are the same.
void linear(const Kernels& kernels, const LinearCall& call, Hands hands = Hands::pool);

// The `count` largest outputs of every row, largest first, ties by lower index: the head of a language model without
// its logits in memory. values: [num_rows, count] floats; indices: [num_rows, count].
void linear_top(const Kernels& kernels, const LinearCall& call, int count, float* values, int32_t* indices);

// The same for count = 1, by vectors. Not-a-number never wins; where nothing is above -infinity, output 0 does.
// `allowed` [num_rows, rows / 8 rounded up]: one bit an output, the lowest first, of those that may win; null = all.
void linear_highest(const Kernels& kernels, const LinearCall& call, const uint8_t* allowed, float* values,
                    int32_t* indices);

}  // namespace mantou
