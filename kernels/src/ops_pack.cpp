// Packing of MLX weight arrays. Evaluates its inputs: call it one module at a time and drop the originals, and the
// peak is the packed model plus one module.
#include "bridge.h"
#include "ops.h"

namespace mantou {
namespace {

struct Shape3 {
  int experts, rows, k;
};

Shape3 shape_of(const array& w) {
  require(w.ndim() == 2 || w.ndim() == 3, "pack: a weight has two axes, or three with experts");
  return w.ndim() == 3 ? Shape3{w.shape(0), w.shape(1), w.shape(2)} : Shape3{1, w.shape(0), w.shape(1)};
}

array evaluated(const array& a) {
  array c = mx::contiguous(a, false, cpu_stream());
  c.eval();
  return c;
}

// Reserves the whole and gives each part its view.
std::vector<Weights> lay_out(Layout layout, const std::vector<int>& rows, bool interleave) {
  const int count = static_cast<int>(rows.size());
  if (count == 1) return {reserve(layout)};
  require(layout.experts == 1, "pack: stacked experts cannot be joined");
  layout.rows = layout.blocks = 0;
  for (int r : rows) {
    require(r % kBlockRows == 0, "pack: joined matrices need rows in multiples of 16");
    require(!interleave || r == rows[0], "pack: interleaved matrices need the same number of rows");
    layout.rows += r;
    layout.blocks += r / kBlockRows;
  }
  std::vector<Weights> out{reserve(layout)};
  int first = 0;
  for (int i = 0; i < count; ++i) {
    out.push_back(interleave ? view(out[0], i, rows[i], count) : view(out[0], first, rows[i], 1));
    first += rows[i] / kBlockRows;
  }
  return out;
}

const Packed& part(const std::vector<Weights>& laid_out, size_t i) {
  return *(laid_out.size() == 1 ? laid_out[0] : laid_out[i + 1]);
}

}  // namespace

std::vector<Weights> pack_affine(const AffineParts& parts, int group, int bits, bool interleave) {
  const size_t count = parts.weights.size();
  require(count >= 1 && parts.scales.size() == count && parts.biases.size() == count, "pack: parts do not match");
  require((bits >= 2 && bits <= 6) || bits == 8, "affine weights of " + std::to_string(bits) + " bits are not supported");
  const mx::Dtype type = parts.scales[0].dtype();
  std::vector<Layout> layouts;
  std::vector<int> rows;
  std::vector<array> scales, biases;
  bool centred = true;
  for (size_t i = 0; i < count; ++i) {
    const Shape3 s = shape_of(parts.weights[i]), g = shape_of(parts.scales[i]);
    require(parts.weights[i].dtype() == mx::uint32, "pack: quantised weights are uint32");
    require(parts.scales[i].dtype() == type && parts.biases[i].dtype() == type, "pack: scales and biases differ in type");
    require(static_cast<int64_t>(s.k) * 32 <= int64_t{kMaxK} * bits, "pack: the input length is too large");
    const int k = static_cast<int>(static_cast<int64_t>(s.k) * 32 / bits);
    layouts.push_back(affine_layout(s.experts, s.rows, k, bits, group, scalar_of(type), false));
    require(k == layouts[0].k, "pack: joined matrices need the same input length");
    require(g.experts == s.experts && g.rows == s.rows && g.k == k / group &&
                parts.biases[i].shape() == parts.scales[i].shape(),
            "pack: scales or biases have the wrong shape");
    rows.push_back(s.rows);
    scales.push_back(evaluated(parts.scales[i]));
    biases.push_back(evaluated(parts.biases[i]));
    const size_t groups = scales[i].size();
    centred = centred && is_centred(scales[i].data<uint8_t>(), biases[i].data<uint8_t>(), groups, bits, scalar_of(type));
  }
  const Layout& l = layouts[0];
  if (centred) layouts[0] = affine_layout(l.experts, l.rows, l.k, bits, group, l.scalar, true);
  std::vector<Weights> out = lay_out(layouts[0], rows, interleave);
  for (size_t i = 0; i < count; ++i) {
    const array w = evaluated(parts.weights[i]);
    fill(part(out, i), {w.data<uint8_t>(), scales[i].data<uint8_t>(), biases[i].data<uint8_t>()});
  }
  return out;
}

std::vector<Weights> pack_dense(const std::vector<array>& weights, bool interleave) {
  require(!weights.empty(), "pack: no weights");
  std::vector<int> rows;
  for (const array& w : weights) {
    require(w.dtype() == weights[0].dtype() && w.shape(-1) == weights[0].shape(-1), "pack: joined matrices differ");
    rows.push_back(shape_of(w).rows);
  }
  const Shape3 s = shape_of(weights[0]);
  std::vector<Weights> out = lay_out(dense_layout(s.experts, s.rows, s.k, scalar_of(weights[0].dtype())), rows, interleave);
  for (size_t i = 0; i < weights.size(); ++i) {
    const array w = evaluated(weights[i]);
    fill(part(out, i), {w.data<uint8_t>(), nullptr, nullptr});
  }
  return out;
}

}  // namespace mantou
