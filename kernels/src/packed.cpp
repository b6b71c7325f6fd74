// Repacking of weights into 16-row blocks. Runs once at load; no kernel, no MLX.
#include "packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "pool.h"

namespace mantou {

// A chunk of memory in 2 MiB pages: a decode step walks all weights, and 4 KiB pages would miss the TLB all the way.
class Arena {
 public:
  explicit Arena(size_t bytes) : size_(round_up(bytes, kPage)), data_(std::aligned_alloc(kPage, size_)) {
    if (data_ == nullptr) throw std::bad_alloc();
    madvise(data_, size_, MADV_HUGEPAGE);  // advice only: without huge pages it is slower, not wrong
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(data_); }

  uint8_t* take(size_t bytes) {  // nullptr when full
    const size_t need = round_up(bytes, 128);
    // What is fetched ahead past a matrix is the next one; past the last it is no read, but it stays inside.
    if (need + kFetchedAhead > size_ - used_) return nullptr;
    uint8_t* p = static_cast<uint8_t*>(data_) + used_;
    used_ += need;
    return p;
  }

  static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  size_t size_, used_ = 0;
  void* data_;
};

namespace {

constexpr size_t kArenaBytes = size_t{32} << 20;

std::pair<uint8_t*, std::shared_ptr<Arena>> allocate(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Arena> open;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto arena = open.lock())
    if (uint8_t* p = arena->take(bytes)) return {p, arena};
  auto arena = std::make_shared<Arena>(std::max(bytes + kFetchedAhead, kArenaBytes));
  open = arena;
  return {arena->take(bytes), arena};
}

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("[mantou_kernels] " + what);
}

void check_sizes(int experts, int rows, int k) {
  require(experts >= 1 && rows >= 1, "a weight matrix needs at least one row");
  require(k >= 1 && k <= kMaxK, "input length " + std::to_string(k) + " is outside 1.." + std::to_string(kMaxK));
}

// Value `index` of a little-endian bit stream.
int stream_value(const uint8_t* row, int index, int bits) {
  const size_t bit = static_cast<size_t>(index) * bits;
  unsigned word = row[bit / 8];
  if (bit % 8 + bits > 8) word |= static_cast<unsigned>(row[bit / 8 + 1]) << 8;
  return static_cast<int>((word >> (bit % 8)) & ((1u << bits) - 1));
}

// 32 values of one row from its bit stream.
void decode_unit(const uint8_t* row, int first, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, row + first, kUnit);
  } else if (bits == 4) {
    for (int i = 0; i < kUnit / 2; ++i) {
      const uint8_t two = row[first / 2 + i];
      out[2 * i] = two & 15;
      out[2 * i + 1] = two >> 4;
    }
  } else {
    for (int i = 0; i < kUnit; ++i) out[i] = static_cast<uint8_t>(stream_value(row, first + i, bits));
  }
}

void fold_nibbles(const uint8_t v[8][64], uint8_t mask, uint8_t* out) {
  for (int t = 0; t < 4; ++t)
    for (int b = 0; b < 64; ++b)
      out[64 * t + b] = static_cast<uint8_t>((v[2 * t][b] & mask) | (v[2 * t + 1][b] & mask) << 4);
}
void fold_pairs(const uint8_t v[8][64], int shift, uint8_t* out) {
  for (int t = 0; t < 2; ++t)
    for (int b = 0; b < 64; ++b) {
      int byte = 0;
      for (int i = 0; i < 4; ++i) byte |= (v[4 * t + i][b] >> shift & 3) << (2 * i);
      out[64 * t + b] = static_cast<uint8_t>(byte);
    }
}
void fold_bits(const uint8_t v[8][64], int shift, uint8_t* out) {
  for (int b = 0; b < 64; ++b) {
    int byte = 0;
    for (int i = 0; i < 8; ++i) byte |= (v[i][b] >> shift & 1) << i;
    out[b] = static_cast<uint8_t>(byte);
  }
}

void encode_unit(const uint8_t v[8][64], int bits, uint8_t* out) {
  switch (bits) {
    case 2: fold_pairs(v, 0, out); break;
    case 3: fold_pairs(v, 0, out), fold_bits(v, 2, out + 128); break;
    case 4: fold_nibbles(v, 15, out); break;
    case 5: fold_nibbles(v, 15, out), fold_bits(v, 4, out + 256); break;
    case 6: fold_nibbles(v, 15, out), fold_pairs(v, 4, out + 256); break;
    default: std::memcpy(out, v, 8 * 64);
  }
}

// The value at unit position k (0..31) of row r, the inverse of encode_unit.
int unit_value(const uint8_t* unit, int bits, int r, int k) {
  const int i = k / 4, b = 4 * r + k % 4;
  const auto nibble = [&] { return unit[64 * (i / 2) + b] >> (i % 2 * 4) & 15; };
  const auto pair = [&](int at) { return unit[at + 64 * (i / 4) + b] >> (i % 4 * 2) & 3; };
  const auto bit = [&](int at) { return unit[at + b] >> i & 1; };
  switch (bits) {
    case 2: return pair(0);
    case 3: return pair(0) | bit(128) << 2;
    case 4: return nibble();
    case 5: return nibble() | bit(256) << 4;
    case 6: return nibble() | pair(256) << 4;
    default: return unit[64 * i + b];
  }
}

void pack_affine_block(const Layout& l, const Source& s, size_t row0, int num_rows, uint8_t* out) {
  const size_t row_bytes = static_cast<size_t>(l.k) * l.bits / 8, groups = static_cast<size_t>(l.k) / l.group;
  const size_t es = size_of(l.scalar);
  alignas(64) uint8_t v[8][64];
  uint8_t values[kUnit];
  for (size_t g = 0; g < groups; ++g) {
    for (int u = 0; u < l.group / kUnit; ++u, out += 64 * l.bits) {
      std::memset(v, 0, sizeof(v));
      for (int r = 0; r < num_rows; ++r) {
        const int first = static_cast<int>(g) * l.group + u * kUnit;
        decode_unit(s.weights + (row0 + r) * row_bytes, first, l.bits, values);
        for (int i = 0; i < 8; ++i) std::memcpy(&v[i][4 * r], values + 4 * i, 4);
      }
      encode_unit(v, l.bits, out);
    }
    const size_t tail = (l.centred ? 16 : 32) * es;
    std::memset(out, 0, tail);  // rows past the end: scale and bias 0
    for (int r = 0; r < num_rows; ++r) {
      std::memcpy(out + r * es, s.scales + ((row0 + r) * groups + g) * es, es);
      if (!l.centred) std::memcpy(out + (16 + r) * es, s.biases + ((row0 + r) * groups + g) * es, es);
    }
    out += tail;
  }
}

size_t dense_offset(Scalar s, int r, int k) {  // in elements
  return s == Scalar::bf16 ? static_cast<size_t>(k / 2) * 32 + r * 2 + k % 2 : static_cast<size_t>(k) * 16 + r;
}

void pack_dense_block(const Layout& l, const Source& s, size_t row0, int num_rows, uint8_t* out) {
  const size_t es = size_of(l.scalar);
  std::memset(out, 0, l.block_bytes);
  for (int r = 0; r < num_rows; ++r) {
    const uint8_t* row = s.weights + (row0 + r) * l.k * es;
    for (int k = 0; k < l.k; ++k) std::memcpy(out + dense_offset(l.scalar, r, k) * es, row + k * es, es);
  }
}

float rounded(float x, Scalar to) {
  if (to == Scalar::f32) return x;
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (to == Scalar::bf16) {
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&x, &u, 4);
    return x;
  }
  // Round to 11 significant bits by adding and removing a number 2^13 times as large; f16 subnormals have fewer bits.
  const float magnitude = x < 0 ? -x : x;
  if (!(magnitude < 65520.0f)) return magnitude == magnitude ? std::copysign(INFINITY, x) : x;
  const float shift = magnitude < 6.103515625e-5f ? 0.5f : 0.0f;
  if (shift > 0) return x < 0 ? -((magnitude + shift) - shift) : (magnitude + shift) - shift;
  u = (u + 0xfff + (u >> 13 & 1)) & ~uint32_t{0x1fff};
  std::memcpy(&x, &u, 4);
  return x;
}

}  // namespace

Layout affine_layout(int experts, int rows, int k, int bits, int group, Scalar scales, bool centred) {
  check_sizes(experts, rows, k);
  require((bits >= 2 && bits <= 6) || bits == 8, "affine weights of " + std::to_string(bits) + " bits are not supported");
  require(group == 32 || group == 64 || group == 128, "group size " + std::to_string(group) + " is not 32, 64 or 128");
  require(k % group == 0, "input length " + std::to_string(k) + " is not a multiple of the group size");
  const int blocks = (rows + kBlockRows - 1) / kBlockRows;
  const size_t group_bytes = static_cast<size_t>(group) / kUnit * 64 * bits + (centred ? 16 : 32) * size_of(scales);
  return {Form::affine, scales, bits, group, centred, rows, k, k, experts, blocks, group_bytes * (k / group)};
}

bool is_centred(const uint8_t* scales, const uint8_t* biases, size_t count, int bits, Scalar type) {
  const float middle = -static_cast<float>(1 << (bits - 1));
  for (size_t i = 0; i < count; ++i)
    if (!(to_float(biases, i, type) == middle * to_float(scales, i, type))) return false;
  return true;
}

Layout dense_layout(int experts, int rows, int k, Scalar weights) {
  check_sizes(experts, rows, k);
  const int padded = (k + 15) / 16 * 16, blocks = (rows + kBlockRows - 1) / kBlockRows;
  return {Form::dense, weights, 0, 0, false, rows, k, padded, experts, blocks, size_of(weights) * 16 * padded};
}

std::shared_ptr<Packed> reserve(const Layout& l) {
  auto [bytes, owner] = allocate(l.block_bytes * l.blocks * l.experts);
  return std::make_shared<Packed>(Packed{l, bytes, l.block_bytes, l.block_bytes * l.blocks, owner});
}

void fill(const Packed& matrix, const Source& source) {
  const Layout& l = matrix.layout;
  Pool::instance().run(l.experts * l.blocks, 8, 1e3, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int expert = i / l.blocks, block = i % l.blocks;
      const size_t row0 = static_cast<size_t>(expert) * l.rows + static_cast<size_t>(block) * kBlockRows;
      const int num_rows = std::min(kBlockRows, l.rows - block * kBlockRows);
      uint8_t* to = matrix.block(expert, block);
      l.form == Form::affine ? pack_affine_block(l, source, row0, num_rows, to)
                             : pack_dense_block(l, source, row0, num_rows, to);
    }
  });
}

std::shared_ptr<Packed> view(const std::shared_ptr<Packed>& whole, int first, int rows, int step) {
  Layout l = whole->layout;
  const int blocks = (rows + kBlockRows - 1) / kBlockRows;
  require(rows >= 1 && first >= 0 && step >= 1 && first + (blocks - 1) * step < l.blocks && l.experts == 1,
          "a view must lie inside the joined matrix");
  l.rows = rows;
  l.blocks = blocks;
  return std::make_shared<Packed>(Packed{l, whole->block(0, first), whole->stride * step, 0, whole->owner});
}

void unpack_row(const Packed& matrix, int expert, int row, Scalar round_to, float* out) {
  const Layout& l = matrix.layout;
  const uint8_t* p = matrix.block(expert, row / kBlockRows);
  const int r = row % kBlockRows;
  if (l.form == Form::dense) {
    for (int k = 0; k < l.k; ++k) out[k] = to_float(p, dense_offset(l.scalar, r, k), l.scalar);
    return;
  }
  const size_t unit_bytes = static_cast<size_t>(64) * l.bits, es = size_of(l.scalar);
  for (int k0 = 0; k0 < l.k; k0 += l.group) {
    const uint8_t* scales = p + unit_bytes * (l.group / kUnit);
    const float s = to_float(scales, r, l.scalar);
    const float b = l.centred ? -s * static_cast<float>(1 << (l.bits - 1)) : to_float(scales + 16 * es, r, l.scalar);
    for (int k = 0; k < l.group; ++k) {
      const int q = unit_value(p + unit_bytes * (k / kUnit), l.bits, r, k % kUnit);
      out[k0 + k] = rounded(rounded(s * static_cast<float>(q), round_to) + b, round_to);
    }
    p = scales + (l.centred ? 16 : 32) * es;
  }
}

}  // namespace mantou
