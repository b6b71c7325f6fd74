// The AMX kernels with their instructions emulated, on AVX2: run it anywhere, to see that tiles, planes and groups fit.
// Their activations lie as the real ones read them, so the AVX2 kernels of the same file cannot stand beside them.
#define MANTOU_ISA emulated
#define MANTOU_AMX_EMULATED
#include "kernels.h"
#include "simd.h"

namespace mantou::MANTOU_ISA {
namespace {

#include "affine.inl"

void block(const Layout&, const uint8_t*, const uint8_t*, int, int, float*) { std::abort(); }

#include "amx.inl"

}  // namespace
}  // namespace mantou::MANTOU_ISA

namespace mantou {

extern const Kernels kernels_emulated;
const Kernels kernels_emulated = [] {
  Kernels table{};
  table.name = "AMX, emulated";
  table.prepare = MANTOU_ISA::prepare_affine;
  table.block = MANTOU_ISA::amx_block;
  return table;
}();

}  // namespace mantou
