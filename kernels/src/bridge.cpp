// The active kernel table, and contiguous reading of strided arrays.
#include "bridge.h"

#include <atomic>
#include <cstring>

namespace mantou {
namespace {

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> table{kernels_for_cpu()};
  return table;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* table = active().load(std::memory_order_relaxed);
  if (table == nullptr) throw std::runtime_error("[mantou_kernels] this CPU has neither AVX2 nor NEON dot products");
  return *table;
}

const char* select_kernels(const std::string& name) {
  if (!name.empty()) {
    const Kernels* table = kernels_for_cpu(name.c_str());
    require(table != nullptr, "this CPU cannot run the kernels for " + name);
    active().store(table);
  }
  return kernels().name;
}

const uint8_t* contiguous(const array& a, Scratch& scratch) {
  if (a.flags().row_contiguous) return a.data<uint8_t>();
  const size_t item = a.itemsize();
  uint8_t* start = scratch.take(a.nbytes() + 64);
  uint8_t* to = start;
  const int dims = static_cast<int>(a.ndim()), inner = a.shape(-1);
  const auto& shape = a.shape();
  const auto& strides = a.strides();
  std::vector<int> index(dims, 0);
  for (size_t rows = a.size() / std::max(1, inner); rows > 0; --rows) {
    int64_t offset = 0;
    for (int d = 0; d < dims - 1; ++d) offset += index[d] * strides[d];
    const uint8_t* from = a.data<uint8_t>() + offset * static_cast<int64_t>(item);
    if (strides[dims - 1] == 1) {
      std::memcpy(to, from, inner * item);
      to += inner * item;
    } else {
      for (int k = 0; k < inner; ++k, to += item)
        std::memcpy(to, from + k * strides[dims - 1] * static_cast<int64_t>(item), item);
    }
    for (int d = dims - 2; d >= 0 && ++index[d] == shape[d]; --d) index[d] = 0;
  }
  return start;
}

}  // namespace mantou
