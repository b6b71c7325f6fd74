// A weight matrix repacked for the kernels, and how it is laid out. Knows no MLX and no instruction set.
//
// Sixteen output rows form a block, the unit of work: one contiguous stream, so that lanes are output rows and no
// kernel needs a horizontal sum.
//
// Quantised block = groups along K; a group = group_size/32 units, then 16 scales, then 16 biases. Centred weights, whose
// bias is always -scale * 2^(bits - 1) (Q4_0 and its like), leave the biases out: a tenth less to read.
//   A unit holds 32 values of k for 16 rows as eight byte vectors v[0..7] of 64 bytes; byte 4*row+j of v[i] is the
//   value at k = 4*i+j. Below 8 bits the eight vectors are folded into bit planes of 64-byte vectors:
//     nibble plane  byte = v[2t] | v[2t+1] << 4           4 vectors
//     pair plane    byte = sum_i v[4t+i] << 2i            2 vectors   (2-bit values)
//     bit plane     byte = sum_i v[i] << i                1 vector    (1-bit values)
//   2 = pair, 3 = pair + bit<<2, 4 = nibble, 5 = nibble + bit<<4, 6 = nibble + pair<<4, 8 = the bytes themselves.
// Dense block: f32 and f16 are k-major, 16 rows a step; bf16 holds two k a row in 32 bits (widening is one shift).
//   K is padded with zeros to a multiple of 16, because the kernels sum four equal quarters of K (dense.inl).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "scalar.h"

namespace mantou {

constexpr int kBlockRows = 16;
constexpr int kUnit = 32;           // values of k that share one activation scale
constexpr int kMaxK = 1 << 20;      // longest input row
constexpr int kAffineTile = 16;     // tokens an affine kernel takes at once
constexpr int kMaxTile = 48;        // and at most a dense one (Kernels::dense_tile)
constexpr size_t kFetchedAhead = 8192;  // bytes that a kernel asks memory for before it reads them

enum class Form : uint8_t { affine, dense };

struct Layout {
  Form form;
  Scalar scalar;  // of the weights (dense) or of scales and biases (affine)
  int bits;       // 2, 3, 4, 5, 6 or 8; 0 for dense
  int group;      // 32, 64 or 128; 0 for dense
  bool centred;   // biases follow from the scales
  int rows;       // output rows (of one expert)
  int k;          // input length
  int k_padded;   // dense: multiple of 16; affine: k
  int experts;    // 1 unless the matrix is a stack
  int blocks;     // of one expert
  size_t block_bytes;
};

class Arena;

// A packed matrix: where its blocks lie, and the arena chunk that owns the bytes. It may be a view of a joined one.
struct Packed {
  Layout layout;
  uint8_t* data;
  size_t stride;         // bytes from one block to the next; layout.block_bytes, or twice that in an interleaved pair
  size_t expert_stride;  // bytes from one expert to the next
  std::shared_ptr<Arena> owner;

  uint8_t* block(int expert, int index) const { return data + expert * expert_stride + index * stride; }
  size_t nbytes() const { return static_cast<size_t>(layout.experts) * layout.blocks * layout.block_bytes; }
};

// Where the rows come from: row-major [experts, rows, k] weights (bit stream of `bits` a value, least significant
// first, when affine) and [experts, rows, k/group] scales and biases.
struct Source {
  const uint8_t* weights;
  const uint8_t* scales;
  const uint8_t* biases;
};

// Throws std::invalid_argument when a size is outside what the kernels can read.
Layout affine_layout(int experts, int rows, int k, int bits, int group, Scalar scales, bool centred);
// Whether all `count` biases are -scale * 2^(bits - 1), exactly.
bool is_centred(const uint8_t* scales, const uint8_t* biases, size_t count, int bits, Scalar type);
Layout dense_layout(int experts, int rows, int k, Scalar weights);

// A matrix whose bytes are not written yet; `fill` writes them. Split in two, so that matrices which a fused kernel
// reads together (Q, K and V; gate and up) are packed straight into one matrix, each through a view of it, and also
// stay usable alone without a second copy.
std::shared_ptr<Packed> reserve(const Layout& layout);
void fill(const Packed& matrix, const Source& source);

// Every `step`-th block of `whole` from block `first` on, as a matrix of `rows` rows that shares its bytes.
std::shared_ptr<Packed> view(const std::shared_ptr<Packed>& whole, int first, int rows, int step);

// One row as float, exactly as the kernels read it: scale * q + bias, each step rounded to `round_to`.
void unpack_row(const Packed& matrix, int expert, int row, Scalar round_to, float* out);

}  // namespace mantou
