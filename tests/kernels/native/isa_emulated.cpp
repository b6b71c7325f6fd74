// The AMX kernels with their instructions emulated, on AVX2: run it anywhere, to see that tiles, planes and groups fit.
// Their activations lie as the real ones read them, so the AVX2 kernels of the same file cannot stand beside them.
#define MANTOU_ISA emulated
#define MANTOU_AMX_EMULATED
#include "kernels.h"
#include "simd.h"

namespace mantou::MANTOU_ISA {
namespace {

#include "affine.inl"

void affine(const Layout&, const uint8_t*, const uint8_t*, int, int, float*) { std::abort(); }

#include "amx.inl"

void multiply(const Layout& l, const uint8_t* const* blocks, int count, const uint8_t* tile, int tokens, int planes,
              float* const* out) {
  for (int i = 0; i < count; ++i) amx_block(l, blocks[i], tile, tokens, planes, out[i]);
}

}  // namespace
}  // namespace mantou::MANTOU_ISA

namespace mantou {

extern const Kernels kernels_emulated;
const Kernels kernels_emulated = [] {
  Kernels table{};
  table.name = "AMX, emulated";
  table.prepare = MANTOU_ISA::prepare_affine;
  table.multiply = MANTOU_ISA::multiply;
  table.opened_bytes = MANTOU_ISA::amx_opened_bytes;
  table.open = MANTOU_ISA::amx_open;
  table.multiply_opened = MANTOU_ISA::amx_opened<>;
  table.rest = MANTOU_ISA::amx_rest;
  return table;
}();

}  // namespace mantou
