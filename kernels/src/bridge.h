// Between MLX arrays and the kernels: types, contiguous reading, the active table, the base of our primitives.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "scratch.h"

namespace mantou {

namespace mx = mlx::core;
using mx::array;

// The kernels in use: the best for this CPU until `select` picks others. Throws when the CPU can run none.
const Kernels& kernels();
const char* select_kernels(const std::string& name);

inline void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("[mantou_kernels] " + what);
}

inline bool is_float(mx::Dtype t) { return t == mx::float32 || t == mx::bfloat16 || t == mx::float16; }

inline Scalar scalar_of(mx::Dtype t) {
  require(is_float(t), "expected float32, bfloat16 or float16");
  return t == mx::float32 ? Scalar::f32 : t == mx::bfloat16 ? Scalar::bf16 : Scalar::f16;
}

inline mx::Stream cpu_stream() { return mx::default_stream(mx::Device(mx::Device::cpu)); }

inline array as_type(const array& a, mx::Dtype t) { return a.dtype() == t ? a : mx::astype(a, t, cpu_stream()); }

// f32 view of a small parameter (norm weight, bias).
inline array as_floats(const array& a) { return as_type(a, mx::float32); }

// Row-major bytes of an evaluated array: its own, or a copy in `scratch`. A copy inside the task is cheaper than a
// graph node (10 us). A null scratch belongs to whoever needs the bytes after the next call with the same one.
const uint8_t* contiguous(const array& a, Scratch& scratch);

template <class T>
const T* contiguous_as(const array& a, Scratch& scratch) {
  return reinterpret_cast<const T*>(contiguous(a, scratch));
}

inline void allocate(array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

// A node whose work is one task on the CPU stream's thread.
class CpuPrimitive : public mx::Primitive {
 public:
  explicit CpuPrimitive(mx::Stream stream) : Primitive(stream) {}
  void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error("[mantou_kernels] these primitives run on the CPU only");
  }

 protected:
  // f(inputs, outputs) runs later; MLX keeps the buffers alive until then.
  template <class F>
  void dispatch(const std::vector<array>& inputs, std::vector<array>& outputs, F f) {
    std::vector<array> in, out;
    for (const array& a : inputs) in.push_back(array::unsafe_weak_copy(a));
    for (const array& a : outputs) out.push_back(array::unsafe_weak_copy(a));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [in = std::move(in), out = std::move(out), f = std::move(f)]() mutable { f(in, out); });
  }
};

}  // namespace mantou
