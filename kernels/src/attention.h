// Attention over batch rows and heads: the strides, masks and chunks around the kernel. Knows no MLX.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace mantou {

// A tensor of four axes whose last axis is contiguous. Strides are elements.
struct View4 {
  const void* data = nullptr;
  Scalar type = Scalar::f32;  // meaningless for a bool mask
  int element_bytes = 4;
  int64_t stride[3] = {0, 0, 0};

  const void* at(int64_t a, int64_t b, int64_t c) const {
    return static_cast<const uint8_t*>(data) + (a * stride[0] + b * stride[1] + c * stride[2]) * element_bytes;
  }
};

// A view of packed rows: their bytes, and their scales and biases in the values' type.
struct Packed4 {
  int bits = 0, group = 0;  // bits 0 = plain values
  View4 scales, biases;

  Groups at(int64_t a, int64_t b) const {
    if (bits == 0) return {};
    return {bits, group, scales.at(a, b, 0), biases.at(a, b, 0), scales.stride[2]};
  }
};

// Where position p of a batch row is in a pool: column blocks[p / block] * block + p % block. A block is a power of two,
// at least 16.
struct BlockTable {
  const int32_t* blocks = nullptr;  // [batch, width]; null = position p is in column p
  int width = 0, shift = 0;

  const int32_t* row(int b) const { return blocks == nullptr ? nullptr : blocks + static_cast<int64_t>(b) * width; }
  int capacity() const { return width << shift; }
  int column(int b, int p) const {
    return blocks == nullptr ? p : (row(b)[p >> shift] << shift) + (p & ((1 << shift) - 1));
  }
  // Whether positions [0, end) of row b lie in a pool of `columns`.
  bool fits(int b, int end, int columns) const {
    if (blocks == nullptr) return end <= columns;
    if (end > capacity()) return false;
    for (int i = 0; i << shift < end; ++i)
      if (row(b)[i] < 0 || row(b)[i] >= columns >> shift) return false;
    return true;
  }
};

struct AttentionCall {
  int batch = 0, heads = 0, kv_heads = 0, tokens = 0, keys = 0, head_dim = 0, value_dim = 0;
  float scale = 1;
  View4 q, k, v;  // [batch, heads, tokens, head_dim], [batch, kv_heads, keys, ...]
  BlockTable table;     // where given, k and v are pools: their stride[0] is 0
  Packed4 k_groups, v_groups;  // where packed, k and v are views of bytes with the type of the values
  Scalar round = Scalar::f32;

  // What token t of batch row b sees: keys [t + start[b] - window + 1, t + start[b]] when `start` is given (window 0 =
  // no bound), the causal triangle aligned to the last key when `causal`, otherwise all: lengths[b] keys, or `keys`.
  const int32_t* start = nullptr;
  const int32_t* lengths = nullptr;
  const int32_t* count = nullptr;  // only the first count[b] tokens are real, the others give 0
  // Where given (with `count`), q and out hold real tokens only: token t of row b is their row first[b] + t, and the
  // strides of batch rows mean nothing.
  const int32_t* first = nullptr;
  bool causal = false;
  int window = 0;

  View4 mask;                // bool mask as bytes when mask_is_bool, else an additive mask
  bool has_mask = false, mask_is_bool = false;
  const float* sinks = nullptr;  // [heads]

  void* out = nullptr;  // [batch, tokens, heads, value_dim], contiguous
  Scalar out_type = Scalar::f32;
};

// With Hands::own it is part of a job of the pool; the bits are the same.
void attention(const Kernels& kernels, const AttentionCall& call, Hands hands = Hands::pool);

}  // namespace mantou
