// Drawing the tokens of all rows and positions as one MLX primitive.
#include <cstring>

#include "bridge.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

class Draw : public CpuPrimitive {
 public:
  // Inputs from the ninth on: one bit a token?, how many positions of a row are drawn?
  Draw(mx::Stream s, int num_top, bool restricted, bool counted)
      : CpuPrimitive(s), num_top_(num_top), restricted_(restricted), counted_(counted) {}
  const char* name() const override { return "MantouDraw"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [top = num_top_, restricted = restricted_, counted = counted_](
                                  std::vector<array>& in, std::vector<array>& out) { run(top, restricted, counted, in, out); });
  }

 private:
  static void run(int num_top, bool restricted, bool counted, std::vector<array>& in, std::vector<array>& out) {
    static thread_local Scratch scratch[10];
    const int batch = in[0].shape(0), tokens = in[0].shape(1), vocab = in[0].shape(2);
    const uint8_t* logits = contiguous(in[0], scratch[0]);
    const auto* sampled = contiguous(in[1], scratch[1]);
    const auto* gain = contiguous_as<float>(in[2], scratch[2]);
    const auto* top_p = contiguous_as<float>(in[3], scratch[3]);
    const auto* top_k = contiguous_as<int32_t>(in[4], scratch[4]);
    const auto* min_p = contiguous_as<float>(in[5], scratch[5]);
    const auto* words = contiguous_as<uint32_t>(in[6], scratch[6]);
    const auto* positions = contiguous_as<uint32_t>(in[7], scratch[7]);
    const uint8_t* allowed = restricted ? contiguous(in[8], scratch[8]) : nullptr;
    const int32_t* count = counted ? contiguous_as<int32_t>(in[8 + restricted], scratch[9]) : nullptr;
    const size_t num_bytes = (static_cast<size_t>(vocab) + 7) / 8;
    const Scalar type = scalar_of(in[0].dtype());
    const Kernels& f = kernels();
    const double cost_us = static_cast<double>(in[0].size()) * 2e-3;
    Pool::instance().run(batch * tokens, 1, cost_us, [&](int begin, int end) {
      static thread_local Scratch row;
      for (int i = begin; i < end; ++i) {
        const int b = i / tokens;
        if (count != nullptr && i % tokens >= count[b]) {
          for (array& o : out) std::memset(o.data<uint8_t>() + i * (o.nbytes() / (batch * tokens)), 0, o.nbytes() / (batch * tokens));
          continue;
        }
        const size_t at = static_cast<size_t>(i) * vocab;
        const float* x = type == Scalar::f32 ? reinterpret_cast<const float*>(logits) + at : nullptr;
        if (x == nullptr) {
          float* wide = row.floats(vocab);
          f.load(logits, at, type, vocab, wide);
          x = wide;
        }
        draw(f, {x, allowed == nullptr ? nullptr : allowed + i * num_bytes, vocab, sampled[b] != 0, gain[b], {words[2 * b], words[2 * b + 1]}, positions[i], top_p[b], min_p[b],
                 top_k[b], num_top, out[0].data<int32_t>() + i, num_top < 0 ? nullptr : out[1].data<float>() + i,
                 num_top > 0 ? out[2].data<int32_t>() + static_cast<size_t>(i) * num_top : nullptr,
                 num_top > 0 ? out[3].data<float>() + static_cast<size_t>(i) * num_top : nullptr});
      }
    });
  }

  int num_top_;
  bool restricted_, counted_;
};

}  // namespace

std::vector<array> draw(const array& logits, const DrawOptions& o) {
  require(logits.ndim() == 3 && is_float(logits.dtype()) && logits.size() > 0, "draw: logits are floats [B, T, V]");
  require(logits.shape(2) <= kMaxVocab, "draw: the vocabulary is over 4194304");
  require(o.num_top >= -1 && o.num_top <= logits.shape(2), "draw: num_top is over the vocabulary");
  const auto rows = static_cast<size_t>(logits.shape(0));
  for (const array* a : {&o.sampled, &o.inverse_temperature, &o.top_p, &o.top_k, &o.min_p_log})
    require(a->size() == rows, "draw: one value a row is expected");
  require(o.sampled.dtype() == mx::bool_ && o.top_k.dtype() == mx::int32, "draw: sampled is bool, top_k int32");
  require(o.seed_words.dtype() == mx::uint32 && o.seed_words.size() == 2 * rows, "draw: seed words are uint32 [B, 2]");
  require(o.positions.dtype() == mx::uint32 && o.positions.size() == rows * logits.shape(1),
          "draw: positions are uint32 [B, T]");
  require(!o.allowed || (o.allowed->dtype() == mx::uint8 && o.allowed->shape() == mx::Shape{logits.shape(0), logits.shape(1),
                                                                                         (logits.shape(2) + 7) / 8}),
          "draw: what is allowed is uint8 [B, T, V / 8 rounded up]");
  require(!o.count || (o.count->dtype() == mx::int32 && o.count->shape() == mx::Shape{logits.shape(0)}),
          "draw: count is int32 [B]");
  const mx::Shape shape{logits.shape(0), logits.shape(1)}, top{logits.shape(0), logits.shape(1), std::max(1, o.num_top)};
  std::vector<mx::Shape> shapes{shape};
  std::vector<mx::Dtype> types{mx::int32};
  if (o.num_top >= 0) shapes.push_back(shape), types.push_back(mx::float32);
  if (o.num_top > 0) shapes.push_back(top), types.push_back(mx::int32), shapes.push_back(top), types.push_back(mx::float32);
  std::vector<array> inputs{logits, o.sampled, as_floats(o.inverse_temperature), as_floats(o.top_p), o.top_k,
                            as_floats(o.min_p_log), o.seed_words, o.positions};
  if (o.allowed) inputs.push_back(*o.allowed);
  if (o.count) inputs.push_back(*o.count);
  auto node = std::make_shared<Draw>(cpu_stream(), o.num_top, o.allowed.has_value(), o.count.has_value());
  return array::make_arrays(shapes, types, std::move(node), inputs);
}

}  // namespace mantou
