// The inner loops of every instruction set that this program was linked with and this processor runs, against plain
// loops: products of packed integers bit for bit, dense products and attention within float rounding. Knows no MLX, so it
// also runs where MLX does not: an AArch64 build under qemu, an emulated AMX.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "packed.h"

namespace mantou {
#if defined(MANTOU_AMX_EMULATED)
extern const Kernels kernels_emulated;
#endif

namespace {

std::mt19937 generator(7);
float normal() { return std::normal_distribution<float>()(generator); }

int failures = 0;
long checks = 0;

void expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) std::printf("WRONG: %s\n", what.c_str());
}

// A random matrix in the form of a Source: bit stream of `bits` a value, scales and biases in f32.
struct Matrix {
  int rows, k, bits, group;
  std::vector<uint8_t> values, stream;
  std::vector<float> scales, biases;

  Matrix(int rows, int k, int bits, int group, bool centred) : rows(rows), k(k), bits(bits), group(group) {
    for (int i = 0; i < rows * k; ++i) values.push_back(static_cast<uint8_t>(generator() & ((1u << bits) - 1)));
    for (int i = 0; i < rows * k; i += 37) values[i] = static_cast<uint8_t>((1 << bits) - 1);  // the extremes
    stream.assign(static_cast<size_t>(rows) * k * bits / 8, 0);
    for (size_t i = 0; i < values.size(); ++i)
      for (int b = 0; b < bits; ++b)
        if (values[i] >> b & 1) stream[(i * bits + b) / 8] |= static_cast<uint8_t>(1 << (i * bits + b) % 8);
    for (int i = 0; i < rows * k / group; ++i) {
      scales.push_back(0.01f + 0.01f * std::abs(normal()));
      biases.push_back(centred ? -scales.back() * static_cast<float>(1 << (bits - 1)) : normal());
    }
  }
};

struct Quantised {
  std::vector<int> values;
  float scale, sum;
};

Quantised quantised(const float* x, int planes) {
  float largest = 0;
  for (int i = 0; i < kUnit; ++i) largest = std::max(largest, std::abs(x[i]));
  const float limit = planes == 1 ? 127.0f : 32512.0f, inverse = largest > 1e-30f ? limit / largest : 0.0f;
  Quantised q;
  int sum = 0;
  for (int i = 0; i < kUnit; ++i) {
    q.values.push_back(static_cast<int>(std::nearbyint(x[i] * inverse)));
    sum += q.values.back();
  }
  q.scale = largest / limit;
  q.sum = q.scale * static_cast<float>(sum);
  return q;
}

// One output in the arithmetic that packed.h and affine.inl promise.
float product(const Matrix& m, int row, const std::vector<Quantised>& x) {
  float acc = 0;
  for (int u = 0; u < m.k / kUnit; ++u) {
    int sum = 0;
    for (int i = 0; i < kUnit; ++i) sum += m.values[static_cast<size_t>(row) * m.k + u * kUnit + i] * x[u].values[i];
    const int g = row * (m.k / m.group) + u * kUnit / m.group;
    const float dot = static_cast<float>(sum) * m.scales[g];
    acc = std::fmaf(dot, x[u].scale, acc);
    acc = std::fmaf(m.biases[g], x[u].sum, acc);
  }
  return acc;
}

void multiply(const Kernels& f, const Packed& matrix, const uint8_t* tile, int tokens, int planes, float* out) {
  const uint8_t* block = matrix.block(0, 0);
  f.multiply(matrix.layout, &block, 1, tile, tokens, planes, &out);
}

// The same product by way of an opened block; false where the kernels do not open blocks for so many tokens.
bool multiply_opened(const Kernels& f, const Packed& matrix, const uint8_t* tile, int tokens, int planes, float* out) {
  const size_t bytes = f.opened_bytes(matrix.layout, tokens);
  if (bytes == 0) return false;
  std::vector<uint8_t> memory(bytes + 64);
  uint8_t* opened = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  f.open(matrix.layout, matrix.block(0, 0), opened);
  f.multiply_opened(matrix.layout, opened, tile, tokens, planes, out);
  return true;
}

void check_products(const Kernels& f, int k, int bits, int group, bool centred) {
  const int rows = 16;
  const Matrix m(rows, k, bits, group, centred);
  auto packed = reserve(affine_layout(1, rows, k, bits, group, Scalar::f32, centred));
  fill(*packed, {m.stream.data(), reinterpret_cast<const uint8_t*>(m.scales.data()),
                 reinterpret_cast<const uint8_t*>(m.biases.data())});
  for (int planes : {1, 2})
    for (int tokens = 1; tokens <= kAffineTile; ++tokens) {
      std::vector<uint8_t> memory(tile_bytes(packed->layout, kAffineTile) + 64);
      uint8_t* tile = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
      std::vector<std::vector<Quantised>> x(tokens);
      for (int t = 0; t < tokens; ++t) {
        std::vector<float> row(k);
        for (float& v : row) v = normal();
        if (t == 0)
          for (int i = 0; i < kUnit; ++i) row[i] = i % 2 ? 3.0f : -3.0f;  // every integer at its limit
        for (int u = 0; u < k / kUnit; ++u) x[t].push_back(quantised(row.data() + u * kUnit, planes));
        f.prepare(packed->layout, row.data(), t, tokens, planes, tile);
      }
      alignas(64) float out[kAffineTile * kBlockRows], by_opened[kAffineTile * kBlockRows];
      multiply(f, *packed, tile, tokens, planes, out);
      if (multiply_opened(f, *packed, tile, tokens, planes, by_opened))
        expect(std::memcmp(out, by_opened, sizeof(float) * tokens * kBlockRows) == 0,
               std::string(f.name) + " opened block of " + std::to_string(bits) + " bits, tokens " + std::to_string(tokens));
      f.rest();
      for (int t = 0; t < tokens; ++t)
        for (int r = 0; r < rows; ++r) {
          const float want = product(m, r, x[t]);
          expect(std::memcmp(&want, &out[t * kBlockRows + r], 4) == 0,
                 std::string(f.name) + " bits " + std::to_string(bits) + " group " + std::to_string(group) + " planes " +
                     std::to_string(planes) + " tokens " + std::to_string(tokens) + " token " + std::to_string(t) +
                     " row " + std::to_string(r) + ": " + std::to_string(out[t * kBlockRows + r]) + " for " +
                     std::to_string(want));
        }
    }
}

void check_dense(const Kernels& f, int k) {
  std::vector<float> w(static_cast<size_t>(kBlockRows) * k);
  for (float& v : w) v = normal();
  auto packed = reserve(dense_layout(1, kBlockRows, k, Scalar::f32));
  fill(*packed, {reinterpret_cast<const uint8_t*>(w.data()), nullptr, nullptr});
  for (int tokens = 1; tokens <= f.dense_tile; ++tokens) {
    std::vector<uint8_t> memory(tile_bytes(packed->layout, kMaxTile) + 64);
    uint8_t* tile = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    std::vector<float> x(static_cast<size_t>(tokens) * k);
    for (float& v : x) v = normal();
    for (int t = 0; t < tokens; ++t) f.prepare(packed->layout, x.data() + static_cast<size_t>(t) * k, t, tokens, 2, tile);
    alignas(64) float out[kMaxTile * kBlockRows];
    multiply(f, *packed, tile, tokens, 2, out);
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < kBlockRows; ++r) {
        double want = 0;
        for (int i = 0; i < k; ++i) want += double{x[static_cast<size_t>(t) * k + i]} * w[static_cast<size_t>(r) * k + i];
        expect(std::abs(out[t * kBlockRows + r] - want) < 1e-5 * std::sqrt(k) * 4, std::string(f.name) + " dense");
      }
  }
}

void check_attention(const Kernels& f, int num_queries, int num_keys, int dim) {
  std::vector<float> q(static_cast<size_t>(num_queries) * dim), k(static_cast<size_t>(num_keys) * dim), v(k.size());
  for (float& x : q) x = normal() / std::sqrt(static_cast<float>(dim));
  for (float& x : k) x = normal();
  for (float& x : v) x = normal();
  std::vector<float> out(static_cast<size_t>(num_queries) * dim);
  std::vector<float> scratch(attend_scratch_floats(num_queries, dim, dim, num_keys) + 16);
  std::vector<const float*> queries;
  std::vector<float*> outs;
  std::vector<int> first(num_queries, 1), last;
  for (int i = 0; i < num_queries; ++i) {
    queries.push_back(q.data() + static_cast<size_t>(i) * dim);
    outs.push_back(out.data() + static_cast<size_t>(i) * dim);
    last.push_back(num_keys - num_queries + i + 1);
  }
  AttendTask task{};
  task.queries = queries.data(), task.num_queries = num_queries;
  task.keys = k.data(), task.values = v.data();
  task.key_stride = task.value_stride = dim;
  task.kv = task.round = task.bias_scalar = Scalar::f32;
  task.head_dim = task.value_dim = dim;
  task.first = first.data(), task.last = last.data();
  task.out = outs.data(), task.scratch = scratch.data();
  f.attend(task);
  for (int i = 0; i < num_queries; ++i) {
    std::vector<double> p(num_keys, 0), want(dim, 0);
    double sum = 0;
    for (int j = first[i]; j < last[i]; ++j) {
      double score = 0;
      for (int d = 0; d < dim; ++d) score += double{queries[i][d]} * k[static_cast<size_t>(j) * dim + d];
      sum += p[j] = std::exp(score);
    }
    for (int j = first[i]; j < last[i]; ++j)
      for (int d = 0; d < dim; ++d) want[d] += p[j] / sum * v[static_cast<size_t>(j) * dim + d];
    for (int d = 0; d < dim; ++d)
      expect(std::abs(want[d] - outs[i][d]) < 2e-5, std::string(f.name) + " attention of " + std::to_string(num_keys) + " keys");
  }
}

void check_dot(const Kernels& f) {
  for (int n : {1, 15, 16, 17, 64, 100}) {
    std::vector<float> x(n), y(n);
    double want = 0;
    for (int i = 0; i < n; ++i) x[i] = normal(), y[i] = normal(), want += double{x[i]} * y[i];
    expect(std::abs(f.dot(x.data(), y.data(), n) - want) < 1e-5 * n, std::string(f.name) + " dot");
  }
}

void check(const Kernels& f) {
  for (int bits : {2, 3, 4, 5, 6, 8})
    for (int group : {32, 64, 128})
      for (bool centred : {false, true}) check_products(f, 384, bits, group, centred);
  for (int units : {1, 2, 3, 15, 16, 17, 33}) check_products(f, units * kUnit, 4, kUnit, false);
  if (f.attend == nullptr) return;  // products of packed integers are all that an emulated table has
  for (int k : {16, 100, 256}) check_dense(f, k);
  for (int num_queries : {1, 3, 9})
    for (int num_keys : {9, 40, 130}) check_attention(f, num_queries, num_keys, 64);
  check_dot(f);
}

}  // namespace
}  // namespace mantou

int main() {
  using namespace mantou;
  std::vector<const Kernels*> tables;
#if defined(MANTOU_AMX_EMULATED)
  tables.push_back(&kernels_emulated);
#else
  for (const char* name : runnable_kernels()) tables.push_back(kernels_for_cpu(name));
#endif
  for (const Kernels* table : tables) {
    const int before = failures;
    check(*table);
    std::printf("%s: %s\n", table->name, failures == before ? "ok" : "WRONG");
  }
  std::printf("%ld checks of %zu instruction sets, %d wrong\n", checks, tables.size(), failures);
  return failures == 0 && !tables.empty() ? 0 : 1;
}
