// What the operations on key-value buffers share: views of arrays, and the node that stands for unpacked rows.
#pragma once

#include "attention.h"
#include "bridge.h"
#include "ops.h"

namespace mantou {

// A view of an evaluated array of four axes; copies only when the last axis is not contiguous.
inline View4 view_of(const array& a, Scratch& scratch) {
  View4 v;
  v.type = is_float(a.dtype()) ? scalar_of(a.dtype()) : Scalar::f32;
  v.element_bytes = static_cast<int>(a.itemsize());
  if (a.strides(3) == 1 || a.shape(3) == 1) {
    v.data = a.data<uint8_t>();
    for (int i = 0; i < 3; ++i) v.stride[i] = a.strides(i);
    return v;
  }
  v.data = contiguous(a, scratch);
  v.stride[2] = a.shape(3);
  v.stride[1] = v.stride[2] * a.shape(2);
  v.stride[0] = v.stride[1] * a.shape(1);
  return v;
}

// Rows [B, H, T, D * bits / 32] with scales and biases -> [B, H, T, D] in the type of the scales.
class Unpack : public CpuPrimitive {
 public:
  Unpack(mx::Stream s, int bits, int group) : CpuPrimitive(s), bits_(bits), group_(group) {}
  const char* name() const override { return "MantouUnpack"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override;
  int bits() const { return bits_; }
  int group() const { return group_; }
  bool same_packing(const Unpack& other) const { return bits_ == other.bits_ && group_ == other.group_; }

 private:
  int bits_, group_;
};

// The node behind an array that is still to be unpacked, or null.
inline const Unpack* unpacking(const array& a) {
  return a.has_primitive() && a.status() == array::Status::unscheduled ? dynamic_cast<const Unpack*>(&a.primitive())
                                                                       : nullptr;
}

}  // namespace mantou
