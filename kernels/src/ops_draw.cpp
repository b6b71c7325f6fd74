// Drawing the tokens of all rows and positions as one MLX primitive.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bridge.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

struct DrawNode {
  int num_top;
  bool restricted, counted;
  Scalar type;          // of the logits
  Weights weights;      // null: the first input is the logits; else what they are a product of
  int planes;
};

constexpr size_t kAtOnceBytes = size_t{8} << 20;  // of logits, where they come from a product
constexpr int kFewestAtOnce = 16;                 // rows, or the weights are read too often

// Inputs: logits or x, one value a row each of seven, then one bit a token?, how many positions of a row are drawn?
class Draw : public CpuPrimitive {
 public:
  Draw(mx::Stream s, DrawNode node) : CpuPrimitive(s), node_(std::move(node)) {}
  const char* name() const override { return "MantouDraw"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [node = node_](std::vector<array>& in, std::vector<array>& out) { Run(node, in, out).all(); });
  }

 private:
  class Run {
   public:
    Run(const DrawNode& node, std::vector<array>& in, std::vector<array>& out) : node_(node), out_(out) {
      static thread_local Scratch scratch[10];
      batch_ = in[0].shape(0), tokens_ = in[0].shape(1), width_ = in[0].shape(2);
      vocab_ = node.weights ? node.weights->layout.rows : width_;
      from_ = contiguous(in[0], scratch[0]);
      from_type_ = scalar_of(in[0].dtype());
      sampled_ = contiguous(in[1], scratch[1]);
      gain_ = contiguous_as<float>(in[2], scratch[2]);
      top_p_ = contiguous_as<float>(in[3], scratch[3]);
      top_k_ = contiguous_as<int32_t>(in[4], scratch[4]);
      min_p_ = contiguous_as<float>(in[5], scratch[5]);
      words_ = contiguous_as<uint32_t>(in[6], scratch[6]);
      positions_ = contiguous_as<uint32_t>(in[7], scratch[7]);
      allowed_ = node.restricted ? contiguous(in[8], scratch[8]) : nullptr;
      const int32_t* count = node.counted ? contiguous_as<int32_t>(in[8 + node.restricted], scratch[9]) : nullptr;
      for (int i = 0; i < batch_ * tokens_; ++i) {
        if (count == nullptr || i % tokens_ < count[i / tokens_]) {
          places_.push_back(i);
          continue;
        }
        for (array& o : out_) {
          const size_t one = o.nbytes() / (batch_ * tokens_);
          std::memset(o.data<uint8_t>() + i * one, 0, one);
        }
      }
    }

    void all() {
      const int count = static_cast<int>(places_.size());
      if (!node_.weights) return each(0, count, [this](int i) { return from_ + logits_at(places_[i]); });
      const size_t one = static_cast<size_t>(vocab_) * size_of(node_.type);
      const int step = std::max<int>(kFewestAtOnce, static_cast<int>(kAtOnceBytes / one));
      static thread_local Scratch rows, products;
      for (int first = 0; first < count; first += step) {
        const int n = std::min(step, count - first);
        uint8_t* logits = products.take(n * one);
        multiply(first, n, rows, logits);
        each(first, n, [=](int i) { return logits + i * one; });
      }
    }

   private:
    size_t logits_at(int place) const { return static_cast<size_t>(place) * vocab_ * size_of(node_.type); }

    void multiply(int first, int n, Scratch& rows, uint8_t* logits) const {
      const size_t one = static_cast<size_t>(width_) * size_of(from_type_);
      uint8_t* x = rows.take(n * one);
      for (int i = 0; i < n; ++i) std::memcpy(x + i * one, from_ + places_[first + i] * one, one);
      LinearCall c;
      c.weights = node_.weights.get();
      c.x = x, c.x_type = from_type_, c.num_rows = n, c.planes = node_.planes;
      c.out = logits, c.out_type = node_.type;
      linear(kernels(), c);
    }

    // Draws at places_[first .. first + n), of the logits that `row(i)` points at.
    template <class F>
    void each(int first, int n, F row) {
      const double cost_us = static_cast<double>(n) * vocab_ * 2e-3;
      Pool::instance().run(n, 1, cost_us, [&](int begin, int end) {
        static thread_local Scratch wide;
        for (int i = begin; i < end; ++i) {
          const float* x = reinterpret_cast<const float*>(row(i));
          if (node_.type != Scalar::f32) {
            float* floats = wide.floats(vocab_);
            kernels().load(row(i), 0, node_.type, vocab_, floats);
            x = floats;
          }
          one(places_[first + i], x);
        }
      });
    }

    void one(int i, const float* x) {
      const int b = i / tokens_, top = node_.num_top;
      const size_t num_bytes = (static_cast<size_t>(vocab_) + 7) / 8;
      int32_t* token = out_[0].data<int32_t>() + i;
      draw(kernels(), {x, allowed_ == nullptr ? nullptr : allowed_ + i * num_bytes, vocab_, sampled_[b] != 0, gain_[b],
                       {words_[2 * b], words_[2 * b + 1]}, positions_[i], top_p_[b], min_p_[b], top_k_[b], top, token,
                       top < 0 ? nullptr : out_[2].data<float>() + i,
                       top > 0 ? out_[3].data<int32_t>() + static_cast<size_t>(i) * top : nullptr,
                       top > 0 ? out_[4].data<float>() + static_cast<size_t>(i) * top : nullptr});
      out_[1].data<float>()[i] = x[*token];
    }

    const DrawNode& node_;
    std::vector<array>& out_;
    int batch_, tokens_, width_, vocab_;
    const uint8_t *from_, *sampled_, *allowed_;
    Scalar from_type_;
    const float *gain_, *top_p_, *min_p_;
    const int32_t* top_k_;
    const uint32_t *words_, *positions_;
    std::vector<int> places_;  // row * tokens + position of each draw
  };

  DrawNode node_;
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
  const auto product = product_of(logits);
  const mx::Shape shape{logits.shape(0), logits.shape(1)}, top{logits.shape(0), logits.shape(1), std::max(1, o.num_top)};
  std::vector<mx::Shape> shapes{shape, shape};
  std::vector<mx::Dtype> types{mx::int32, mx::float32};
  if (o.num_top >= 0) shapes.push_back(shape), types.push_back(mx::float32);
  if (o.num_top > 0) shapes.push_back(top), types.push_back(mx::int32), shapes.push_back(top), types.push_back(mx::float32);
  std::vector<array> inputs{product ? product->x : logits, o.sampled, as_floats(o.inverse_temperature),
                            as_floats(o.top_p), o.top_k, as_floats(o.min_p_log), o.seed_words, o.positions};
  if (o.allowed) inputs.push_back(*o.allowed);
  if (o.count) inputs.push_back(*o.count);
  DrawNode node{o.num_top, o.allowed.has_value(), o.count.has_value(), scalar_of(logits.dtype()),
                product ? product->weights : nullptr, product ? product->planes : 0};
  return array::make_arrays(shapes, types, std::make_shared<Draw>(cpu_stream(), std::move(node)), inputs);
}

}  // namespace mantou
