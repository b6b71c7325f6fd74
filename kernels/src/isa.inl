// One instruction set's copy of every kernel, and its table. The including file defines MANTOU_ISA, MANTOU_ISA_NAME
// and MANTOU_TABLE.
#include "kernels.h"
#include "simd.h"

namespace mantou::MANTOU_ISA {
namespace {

#include "affine.inl"
#include "dense.inl"
#include "rows.inl"
#include "kv.inl"
#include "attention.inl"
#include "scan.inl"
#include "draw.inl"

void prepare(const Layout& l, const float* row, int token, int tokens, int planes, uint8_t* tile) {
  l.form == Form::affine ? prepare_affine(l, row, token, tokens, planes, tile)
                         : prepare_dense(l, row, token, tokens, tile);
}

void affine(const Layout& l, const uint8_t* p, const uint8_t* tile, int tokens, int planes, float* out) {
  switch (l.bits) {
    case 2: return affine_block<2>(l, p, tile, tokens, planes, out);
    case 3: return affine_block<3>(l, p, tile, tokens, planes, out);
    case 4: return affine_block<4>(l, p, tile, tokens, planes, out);
    case 5: return affine_block<5>(l, p, tile, tokens, planes, out);
    case 6: return affine_block<6>(l, p, tile, tokens, planes, out);
    default: return affine_block<8>(l, p, tile, tokens, planes, out);
  }
}

#if defined(MANTOU_AMX)
#include "amx.inl"
#endif

using Affine = void (*)(const Layout&, const uint8_t* p, const uint8_t* tile, int tokens, int planes, float* out);

template <Affine affine_one>
void multiply(const Layout& l, const uint8_t* const* blocks, int count, const uint8_t* tile, int tokens, int planes,
              float* const* out) {
  if (l.form == Form::dense && count == kDensePair) {
    DenseBlocks<kDensePair> all;
    for (int i = 0; i < kDensePair; ++i) all.weights[i] = blocks[i], all.out[i] = out[i];
    return dense_blocks<kDensePair>(l, all, tile, tokens);
  }
  for (int i = 0; i < count; ++i)
    l.form == Form::dense ? dense_blocks<1>(l, {{blocks[i]}, {out[i]}}, tile, tokens)
                          : affine_one(l, blocks[i], tile, tokens, planes, out[i]);
}

}  // namespace

// What differs between the tables of one instruction set.
struct Products {
  decltype(Kernels::multiply) multiply;
  decltype(Kernels::opened_bytes) opened_bytes;
  decltype(Kernels::open) open;
  decltype(Kernels::multiply_opened) multiply_opened;
  decltype(Kernels::rest) rest;
};

constexpr Kernels table(const char* name, const Products& products) {
  return {
    name,
    MANTOU_ISA::kDenseTile,
    MANTOU_ISA::kDenseWide,
    MANTOU_ISA::kDenseFew,
    MANTOU_ISA::prepare,
    products.multiply,
    products.opened_bytes,
    products.open,
    products.multiply_opened,
    products.rest,
    MANTOU_ISA::load_row,
    MANTOU_ISA::store_row,
    MANTOU_ISA::round_row,
    MANTOU_ISA::add_row,
    MANTOU_ISA::finish_tile,
    MANTOU_ISA::rms_norm_row,
    MANTOU_ISA::layer_norm_row,
    MANTOU_ISA::gate_row,
    MANTOU_ISA::rope_row,
    MANTOU_ISA::dot_row,
    MANTOU_ISA::axpy_row,
    MANTOU_ISA::attend,
    MANTOU_ISA::unpack_row,
    MANTOU_ISA::quantise_row,
    MANTOU_ISA::gated_delta,
    MANTOU_ISA::ssm,
    {MANTOU_ISA::restrict_row, MANTOU_ISA::highest_of, MANTOU_ISA::exp_row, MANTOU_ISA::add_in_order,
     MANTOU_ISA::bucket_row, MANTOU_ISA::select_from, MANTOU_ISA::select_equal, MANTOU_ISA::scores_row},
  };
}

}  // namespace mantou::MANTOU_ISA

namespace mantou {

extern const Kernels MANTOU_TABLE;
const Kernels MANTOU_TABLE = MANTOU_ISA::table(
    MANTOU_ISA_NAME, {MANTOU_ISA::multiply<MANTOU_ISA::affine>, [](const Layout&, int) -> size_t { return 0; },
                      nullptr, nullptr, [] {}});

#if defined(MANTOU_AMX)
// The same kernels but for several tokens times quantised weights.
extern const Kernels kernels_amx;
const Kernels kernels_amx = MANTOU_ISA::table(
    "amx", {MANTOU_ISA::multiply<MANTOU_ISA::amx_block>, MANTOU_ISA::amx_opened_bytes, MANTOU_ISA::amx_open,
            MANTOU_ISA::amx_opened<>, MANTOU_ISA::amx_rest});

bool amx_gives_right_products();
bool amx_gives_right_products() { return MANTOU_ISA::amx_multiplies(); }
#endif

}  // namespace mantou
