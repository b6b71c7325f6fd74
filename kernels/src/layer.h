// A whole pre-norm decoder layer: norm, QKV, head norms, rotary embedding, append, attention, output, gated MLP.
// Knows no MLX. Every step is the same code, with the same rounding, as the separate operations: fused and separate
// layers give the same bits.
//
//   n = norm(x);  q, k, v = n Wqkv;  q, k = rope(head_norm(q)), rope(head_norm(k));  append k, v
//   h = x + [norm](attention(q, K, V) Wo);  y = h + [norm]((gate(norm(h) Wg) * (norm(h) Wu)) Wd)
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "kv_buffer.h"
#include "rope_table.h"

namespace mantou {

struct LayerSpec {
  std::shared_ptr<Packed> qkv, out, gate_up, down;  // q, k and v rows follow each other; gate and up blocks alternate
  std::vector<float> qkv_bias, out_bias;            // empty = none, here and below
  std::vector<float> input_norm, mlp_norm;
  std::vector<float> attention_out_norm, mlp_out_norm;  // norms before each residual (Gemma)
  std::vector<float> query_norm, key_norm;              // per head
  float eps = 1e-5f;
  int heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  std::shared_ptr<RopeTable> rope;
  int rope_dims = 0;
  bool rope_traditional = false;
  float rope_input_scale = 1;  // of the rotated part before it is rotated (YaRN, long rope)
  Gate gate = Gate::silu;
  int planes = 2;
};

// The sizes that do not fit each other are std::invalid_argument.
void check_layer(const LayerSpec& spec);

struct LayerCall {
  const void* x = nullptr;  // [batch, tokens, hidden]
  void* out = nullptr;      // like x, and may be x
  Scalar type = Scalar::f32;
  int batch = 0, tokens = 0;
  KVBuffer keys, values;  // row b starts at position start[b]
  const int32_t* start = nullptr;
  const int32_t* count = nullptr;  // real tokens of each row, or null for all; the others append nothing and give 0
  int window = 0;
  // Position p lives in column p % ring and `mask` says what is seen; 0 = column p, and the window says it.
  int ring = 0;
  View4 mask;  // bytes [batch, heads, tokens, ring]
  const Packed* next = nullptr;  // the first weights that are read after this layer, if they are known
};

void run_layer(const Kernels& kernels, const LayerSpec& spec, const LayerCall& call);

}  // namespace mantou
