// How much memory the kernels want for what they are given.
#include "kernels.h"

namespace mantou {

size_t tile_bytes(const Layout& l, int tokens) {
  const size_t t = tokens;
  return l.form == Form::dense ? l.k_padded * t * 4 : static_cast<size_t>(l.k / kUnit) * t * (64 + 8);
}

size_t attend_scratch_floats(int num_queries, int head_dim, int value_dim, int num_keys) {
  const auto padded = [](int n) { return static_cast<size_t>((n + 15) / 16 * 16); };
  const size_t keys = padded(head_dim) * 16, values = padded(value_dim) * kKeyTile;
  return keys + values + static_cast<size_t>(num_queries) * (padded(num_keys) + 16 + padded(value_dim));
}

}  // namespace mantou
