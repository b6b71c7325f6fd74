// The operations as functions on MLX arrays. Shapes are checked here, before anything runs: a wrong one throws
// std::invalid_argument with the operation's name. Values that are known only later (token ids, positions, expert
// indices) are checked in the task; MLX reports that error when the result is evaluated.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "encoder.h"
#include "kernels.h"
#include "layer.h"

namespace mantou {

namespace mx = mlx::core;
using mx::array;
using Weights = std::shared_ptr<Packed>;
using Optional = std::optional<array>;
constexpr int kMaxVocab = 1 << 22;

// ---- ops_pack.cpp: [experts?, rows, k] weights; several parts are packed into one matrix.
// Returns the whole and, when there are several parts, a view of each.
struct AffineParts {
  std::vector<array> weights, scales, biases;
};
std::vector<Weights> pack_affine(const AffineParts& parts, int group, int bits, bool interleave);
std::vector<Weights> pack_dense(const std::vector<array>& weights, bool interleave);

// ---- ops_linear.cpp
// x [..., k] -> [..., rows] (half of it when gated). The result has `type`, default: promotion of x and the scales.
struct LinearOptions {
  Optional norm;
  float norm_eps = 1e-5f;
  Optional bias, residual;
  std::string gate;  // "", "silu", "gelu_tanh" or "gelu_erf"; needs interleaved gate and up weights
  int planes = 2;
  std::optional<mx::Dtype> type;
};
array linear(const array& x, const Weights& weights, const LinearOptions& options);
// Row i of the result is x[source[i]] times expert[i]; x [n, k], source and expert int32 [m] -> [m, rows].
array gather_linear(const array& x, const Weights& weights, const array& source, const array& expert, Optional bias,
                    int planes);
array embed(const array& ids, const Weights& weights, mx::Dtype type);
// x [..., k] -> values f32 [..., count] and indices int32 [..., count], largest first, ties by lower index.
std::vector<array> linear_top(const array& x, const Weights& weights, int count, const LinearOptions& options);
// Of logits that `linear` was asked for and that nobody has computed yet: the index of the largest, int32 [...], and its
// value, f32 [...], without the logits in memory. Ties by lower index; where no logit is a number above -infinity, the
// first. `allowed` uint8 [..., V / 8 rounded up]: one bit a logit, the lowest first, of those that may win; blocks of
// which none may are not multiplied. Nothing where the logits come from elsewhere.
std::optional<std::vector<array>> highest_of_product(const array& logits, const Optional& allowed);
// A product of `linear` that nobody has computed yet, and that is nothing else: x [..., k] times weights.
struct Product {
  array x;
  Weights weights;
  int planes;
};
std::optional<Product> product_of(const array& logits);
// base [m, n] + scale[s] * (x [m, k] a[s]^T) b[s]^T with s = slot[row]; a [slots, r, k], b [slots, n, r]; slot < 0 = none.
array adapter_rows(const array& base, const array& x, const array& a, const array& b, const array& scale,
                   const array& slot);

// ---- ops_rows.cpp
array rms_norm(const array& x, const Optional& weight, float eps);
array layer_norm(const array& x, const Optional& weight, const Optional& bias, float eps);
array gate(const std::string& kind, const array& gate, const Optional& up);
// x [B, ..., T, D]; offset int32 scalar or [B]; exactly one of base and freqs ([dims/2], periods).
array rope(const array& x, int dims, bool traditional, std::optional<float> base, float scale, const array& offset,
           const Optional& freqs);

// ---- ops_attention.cpp
struct AttentionOptions {
  bool causal = false;
  Optional mask, sinks;
  Optional start;  // int32 [B]: position of the first query of each row; keys are at columns 0, 1, ...
  int window = 0;
  // Packed keys and values: k and v are uint32 [B, Hk, S, D * bits / 32], as mx.quantize makes them.
  std::vector<array> groups;  // scales and biases of k, then of v: [B, Hk, S, D / group]
  int bits = 0, group = 0;
  // Paged: k and v [1, Hk, columns, ...] are pools, and position p of row b is in column table[b, p / block] * block +
  // p % block; the first `columns` positions are the keys. See block_shift.
  Optional table;
  int block = 0, columns = 0;
};
array attention(const array& q, const array& k, const array& v, float scale, const AttentionOptions& options);
// With o.bits = 0 and keys and values that wait to be unpacked (unpack_rows), they are read packed.

// ---- ops_kv.cpp
// buffer [slots, H, capacity, D] of any type with rows [B, H, T, D] at columns position[b] ... (mod ring, if it is not 0)
// of slot first_slot + b; reuses the buffer if nobody else holds it. count int32 [B]: only the first count[b] of the T
// are written. A column outside the buffer is an error.
// With `table` the buffer is a pool, as for attention.
struct WriteOptions {
  int first_slot = 0, ring = 0;
  Optional table;
  int block = 0;
};
array kv_write(const array& buffer, const array& rows, const array& position, const Optional& count, const WriteOptions& o);
// x [B, H, T, D] -> integers, scales and biases, and back: the bits of mx.quantize and mx.dequantize.
std::vector<array> pack_rows(const array& x, int bits, int group);
array unpack_rows(const array& words, const array& scales, const array& biases, int bits, int group);

// ---- ops_scan.cpp
// q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv], state [B, Hv, Dv, Dk] f32,
// mask bool [B, T] -> y like v, state.
std::vector<array> gated_delta(const array& q, const array& k, const array& v, const array& g, const array& beta,
                               const array& state, const Optional& mask);
// x [B, T, H, P], a_log [H], b, c [B, T, G, N], d [H], dt [B, T, H] (after softplus and clipping), state [B, H, P, N]
// f32, mask bool [B, T] -> y like x, state.
std::vector<array> ssm(const array& x, const array& a_log, const array& b, const array& c, const array& d,
                       const array& dt, const array& state, const Optional& mask);

// ---- ops_draw.cpp
// One token for each row and position, as mantou/sampling draws it (draw.h). The columns have one value a row; seed
// words uint32 [B, 2]; positions uint32 [B, T].
struct DrawOptions {
  array sampled, inverse_temperature, top_p, top_k, min_p_log, seed_words, positions;
  int num_top;  // -1 = tokens only, 0 = their log-probabilities too, n = and n alternatives
  Optional allowed;  // uint8 [B, T, V / 8 rounded up]: one bit a token, the lowest first
  Optional count;    // int32 [B]: only the first count[b] positions of a row are drawn, the others give 0
};
// logits [B, T, V] -> tokens int32 [B, T], their logits f32 [B, T], and if asked log-probabilities f32 [B, T] and
// alternatives int32 and f32 [B, T, num_top]. Logits that `linear` was asked for and that nobody has computed yet never
// exist all at once: the positions that are drawn are multiplied a few at a time.
std::vector<array> draw(const array& logits, const DrawOptions& options);

// ---- ops_layer.cpp
struct LayerParts {
  Weights qkv, out, gate_up, down;
  Optional qkv_bias, out_bias, input_norm, mlp_norm, attention_out_norm, mlp_out_norm, query_norm, key_norm;
  float eps;
  int heads, kv_heads, head_dim;
  float scale;
  int rope_dims;
  bool rope_traditional;
  std::optional<float> rope_base;
  Optional rope_periods;
  float rope_scale, rope_input_scale;
  std::string gate;
  int planes;
};
std::shared_ptr<LayerSpec> make_layer(const LayerParts& parts);
// Layers that follow each other: x [B, T, hidden] and for each layer its buffers [slots, Hk, capacity, ...] (keys, values
// and, when packed, scales and biases of keys and of values) -> y like x. Once y is evaluated the buffers hold the new
// tokens: the primitive writes into them, and whoever holds them sees it. A view of one keeps what it shows.
// See LayerCall for start, count, window, ring and mask, and KVBuffer for the packing.
struct LayerOptions {
  Optional count, mask;
  int first_slot = 0, window = 0, ring = 0, bits = 0, group = 0;
  Optional table;  // the buffers are pools, as for attention
  int block = 0;
};
array layers(const array& x, const std::vector<std::shared_ptr<LayerSpec>>& specs,
             const std::vector<std::vector<array>>& buffers, const array& start, const LayerOptions& options);

// ---- ops_encoder.cpp
struct EncoderParts {
  Weights qkv, out, up, down;
  Optional qkv_bias, out_bias, up_bias, down_bias, attention_norm, attention_norm_bias, norm, norm_bias;
  float eps;
  int heads;
  float scale;
  std::string activation;
};
std::shared_ptr<EncoderSpec> make_encoder_layer(const EncoderParts& parts);
// x [B, T, hidden] -> like x. lengths int32 [B]: a row's tokens come first, and what lies behind them means nothing.
// x [B, T, D] through the layers in turn -> like x, 0 behind `lengths`, int32[B].
array encoder(const array& x, const std::vector<std::shared_ptr<EncoderSpec>>& layers, const Optional& lengths);

// Shared by the operations.
std::vector<float> floats_of(const Optional& a);
Gate gate_of(const std::string& name);
// Checks a table int32 [batch, blocks] and the size of its blocks, a power of two from 16 on: log2 of it.
int block_shift(const array& table, int block, int batch, const char* what);
std::vector<float> rope_frequencies(float base, int half);

}  // namespace mantou
