// The table of kernels that one instruction set provides. Sizes are elements unless a name says bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draw.h"
#include "packed.h"

namespace mantou {

enum class Gate : uint8_t { silu, gelu_tanh, gelu_erf };

// Affine groups of key or value rows, in MLX's layout: value = scale * integer + bias, each step rounded to `kv` form.
struct Groups {
  int bits = 0;  // 4 or 8; 0 = the rows are the values themselves
  int size = 0;  // 32, 64 or 128 values share a scale and a bias
  const void *scales = nullptr, *biases = nullptr;  // group g of row j at j * stride + g
  int64_t stride = 0;
};

constexpr int kKeyTile = 64;  // keys whose values many queries weigh while they stay in a first-level cache

// One key-value head of one batch row, and the query rows that share it.
struct AttendTask {
  const float* const* queries;  // [num_queries] -> [head_dim], already scaled
  int num_queries;
  const void* keys;    // element (j, d) at j * key_stride + d, in `kv` form; with groups, rows at j * key_stride bytes
  const void* values;  // element (j, d) at j * value_stride + d
  int64_t key_stride, value_stride;
  Scalar kv;
  int head_dim, value_dim;
  // Query i sees the keys j of [first[i], last[i]) that its mask row allows. Masks are [last) long or null.
  const int* first;
  const int* last;
  const uint8_t* const* allowed;  // bool per key, or null
  const void* const* bias;        // added to the score, in `bias_scalar` form, or null
  Scalar bias_scalar;
  const float* sinks;  // [num_queries] extra logits, or null
  Scalar round;        // arithmetic of plain MLX rounds scores and probabilities to the tensors' type
  float* const* out;   // [num_queries] -> [value_dim]
  float* scratch;      // attend_scratch_floats()
  Groups key_groups, value_groups;
  // Column j is row blocks[j >> block_shift] * block + j % block of the keys and values, or row j where there are none.
  const int32_t* blocks = nullptr;
  int block_shift = 0;
};

struct DeltaTask {  // one value head of one batch row of the gated delta rule
  const float *q, *k, *v, *g, *beta;  // row t at t * stride
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride, y_stride;
  const uint8_t* mask;  // [T] or null: a masked step leaves the state and gives 0
  bool vector_gate;     // g has key_dim values a step instead of one
  int steps, key_dim, value_dim;
  float* state;  // [value_dim, key_dim], in place
  float* y;
};

struct SsmTask {  // one head of one batch row of a Mamba-2 recurrence
  const float *x, *b, *c, *dt;  // row t at t * stride; dt is one value a step, after softplus and clipping
  int64_t x_stride, b_stride, c_stride, dt_stride, y_stride;
  float a, d;  // decay rate (negative) and skip
  const uint8_t* mask;  // [T] or null
  int steps, head_dim, state_dim;
  float* state;  // [head_dim, state_dim], in place
  float* y;
};

// What becomes of a product, in this order. Each step rounds to `type`, as the separate operations would.
struct Finish {
  Scalar type;
  const float* bias = nullptr;  // of the block
  bool activated = false;
  Gate activation = Gate::silu;
  const void* residual = nullptr;
};

struct Kernels {
  const char* name;

  int dense_tile, dense_width;  // tokens of a tile of dense weights, and of those that its loops take at once
  int dense_few;                // tokens of a tile up to which they lie side by side

  // Activations of `tokens` (of one tile at most) rows as the block kernels read them. planes: 2 = 16-bit, 1 = 8-bit.
  // For dense weights and more than dense_few tokens: rows of k_padded floats, zero behind k.
  void (*prepare)(const Layout&, const float* row, int token, int tokens, int planes, uint8_t* tile);
  // out[i][token][16] = blocks[i] * tile for one block, or for two. The result of a token does not depend on `tokens`.
  void (*multiply)(const Layout&, const uint8_t* const* blocks, int count, const uint8_t* tile, int tokens, int planes,
                   float* const* out);
  // For a quantised block with several tiles: opened once, then multiplied by each. An opened block has so many bytes;
  // 0 = `multiply` is as quick for tiles of so many tokens.
  size_t (*opened_bytes)(const Layout&, int tokens);
  void (*open)(const Layout&, const uint8_t* block, uint8_t* to);  // `to` at a multiple of 64
  void (*multiply_opened)(const Layout&, const uint8_t* opened, const uint8_t* tile, int tokens, int planes, float* out);
  void (*rest)();  // the calling thread has multiplied what it had: registers of its own go back

  void (*load)(const void* from, size_t offset, Scalar, int n, float* to);
  void (*store)(const float* from, int n, Scalar, void* to, size_t offset);
  void (*round)(float* x, int n, Scalar);
  void (*add)(float* x, const float* y, int n);  // x += y
  // Token m of a block's results, x[m][16], of which the first n count: finished and stored at element at[m].
  void (*finish)(const float* x, int tokens, int n, const Finish&, const size_t* at, void* out);

  void (*rms_norm)(const float* x, const float* weight, float eps, int n, Scalar round, float* y);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, Scalar round, float* y);
  void (*gate)(Gate, const float* gate, const float* up, int n, Scalar round, float* y);  // y may be gate
  // cs: dims/2 cosines, then dims/2 sines. y may be x.
  void (*rope)(const float* x, int n, int dims, bool traditional, const float* cs, Scalar round, float* y);
  float (*dot)(const float* x, const float* y, int n);
  void (*axpy)(float a, const float* x, int n, float* y);  // y += a * x

  void (*attend)(const AttendTask&);
  void (*unpack)(const void* row, const Groups&, Scalar, int n, float* x);
  // x [n], as MLX's quantize packs it: n * bits / 8 bytes, and n / group scales and biases.
  void (*quantise)(const float* x, int n, int bits, int group, Scalar, uint8_t* bytes, void* scales, void* biases);
  void (*gated_delta)(const DeltaTask&);
  void (*ssm)(const SsmTask&);

  DrawKernels draw;
};

size_t tile_bytes(const Layout&, int tokens);
size_t attend_scratch_floats(int num_queries, int head_dim, int value_dim, int num_keys);

// The best table that this CPU can run, or null. `name` picks one by name ("amx", "avx512", "avx_vnni", "avx2", "neon"):
// null when the CPU cannot run it.
const Kernels* kernels_for_cpu(const char* name = nullptr);
// The names of all that it can run, best first.
std::vector<const char*> runnable_kernels();

}  // namespace mantou
