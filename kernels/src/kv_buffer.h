// One key or value buffer of a layer: plain values or affine-quantised groups, written by position. Knows no MLX.
#pragma once

#include <cstdint>

#include "attention.h"
#include "kernels.h"

namespace mantou {

// [slots, heads, capacity, dim], or bytes [..., dim * bits / 8] with scales and biases [..., dim / group].
struct KVBuffer {
  void* data = nullptr;
  void *scales = nullptr, *biases = nullptr;
  Scalar type = Scalar::f32;  // of the values, or of scales and biases
  int bits = 0, group = 0;    // bits 0 = plain values
  int first_slot = 0, heads = 0, capacity = 0, dim = 0;
  BlockTable table;  // where given, all rows share the one slot

  // The positions that a row may have.
  int reach() const { return table.blocks == nullptr ? capacity : table.capacity(); }

  // Stores one head of batch row b; v [dim] is what attention sees, up to packing.
  void put(const Kernels& kernels, int b, int h, int column, const float* v) const {
    const size_t slot = table.blocks == nullptr ? static_cast<size_t>(first_slot) + b : 0;
    const size_t row = (slot * heads + h) * capacity + table.column(b, column);
    if (bits == 0) return kernels.store(v, dim, type, data, row * dim);
    const size_t groups = row * (dim / group) * size_of(type);
    kernels.quantise(v, dim, bits, group, type, static_cast<uint8_t*>(data) + row * row_bytes(),
                     static_cast<uint8_t*>(scales) + groups, static_cast<uint8_t*>(biases) + groups);
  }

  View4 view() const {
    return bits == 0 ? view_of(data, dim, static_cast<int>(size_of(type))) : view_of(data, row_bytes(), 1);
  }

  Packed4 groups() const {
    if (bits == 0) return {};
    const int item = static_cast<int>(size_of(type));
    return {bits, group, view_of(scales, dim / group, item), view_of(biases, dim / group, item)};
  }

 private:
  int row_bytes() const { return dim * bits / 8; }

  View4 view_of(const void* from, int width, int item) const {
    View4 v;
    v.type = type;
    v.element_bytes = item;
    v.stride[2] = width;
    v.stride[1] = v.stride[2] * capacity;
    v.stride[0] = table.blocks == nullptr ? v.stride[1] * heads : 0;
    v.data = static_cast<const uint8_t*>(from) + first_slot * v.stride[0] * item;
    return v;
  }
};

}  // namespace mantou
