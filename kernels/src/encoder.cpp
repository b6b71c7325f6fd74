// The steps of an encoder layer over one thread's scratch memory.
#include "encoder.h"

#include <stdexcept>
#include <string>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "scratch.h"

namespace mantou {
namespace {

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

class EncoderLayer {
 public:
  EncoderLayer(const Kernels& kernels, const EncoderSpec& spec, const EncoderCall& call)
      : k_(kernels), s_(spec), c_(call), rows_(call.batch * call.tokens), hidden_(spec.qkv->layout.k),
        item_(size_of(call.type)) {}

  void run() {
    static thread_local Scratch qkv_memory, attended_memory, hidden_memory, inner_memory;
    uint8_t* qkv = qkv_memory.take(bytes(3 * hidden_));
    product(*s_.qkv, c_.x, s_.qkv_bias, nullptr, qkv);
    uint8_t* mixed = attended_memory.take(bytes(hidden_));
    attend(qkv, mixed);
    uint8_t* h = hidden_memory.take(bytes(hidden_));
    product(*s_.out, mixed, s_.out_bias, c_.x, h);
    normalise(s_.attention_norm, s_.attention_norm_bias, h);
    uint8_t* inner = inner_memory.take(bytes(s_.up->layout.rows));
    product(*s_.up, h, s_.up_bias, nullptr, inner, true);
    product(*s_.down, inner, s_.down_bias, h, c_.out);
    normalise(s_.norm, s_.norm_bias, c_.out);
  }

 private:
  size_t bytes(int width) const { return static_cast<size_t>(rows_) * width * item_; }

  void product(const Packed& w, const void* x, const std::vector<float>& bias, const void* residual, void* out,
               bool activated = false) const {
    LinearCall l;
    l.weights = &w;
    l.x = x;
    l.x_type = l.out_type = c_.type;
    l.num_rows = rows_;
    l.bias = or_null(bias);
    l.activated = activated;
    l.gate = s_.activation;
    l.residual = residual;
    l.out = out;
    linear(k_, l);
  }

  void normalise(const std::vector<float>& weight, const std::vector<float>& bias, void* x) const {
    Pool::instance().run(rows_, 8, rows_ * hidden_ * 1e-3, [&](int begin, int end) {
      static thread_local Scratch memory;
      float* row = memory.floats(hidden_);
      for (int r = begin; r < end; ++r) {
        const size_t at = static_cast<size_t>(r) * hidden_;
        k_.load(x, at, c_.type, hidden_, row);
        k_.layer_norm(row, weight.data(), or_null(bias), s_.eps, hidden_, c_.type, row);
        k_.store(row, hidden_, c_.type, x, at);
      }
    });
  }

  void attend(const uint8_t* qkv, uint8_t* out) const {
    AttentionCall a;
    a.batch = c_.batch, a.tokens = a.keys = c_.tokens, a.heads = a.kv_heads = s_.heads;
    a.head_dim = a.value_dim = hidden_ / s_.heads;
    a.scale = s_.scale;
    View4* views[] = {&a.q, &a.k, &a.v};
    for (int i = 0; i < 3; ++i) {
      View4& v = *views[i];
      v.data = qkv + static_cast<size_t>(i) * hidden_ * item_;
      v.type = c_.type;
      v.element_bytes = static_cast<int>(item_);
      v.stride[0] = static_cast<int64_t>(c_.tokens) * 3 * hidden_, v.stride[1] = a.head_dim, v.stride[2] = 3 * hidden_;
    }
    a.lengths = a.count = c_.lengths;
    a.round = a.out_type = c_.type;
    a.out = out;
    attention(k_, a);
  }

  const Kernels& k_;
  const EncoderSpec& s_;
  const EncoderCall& c_;
  const int rows_, hidden_;
  const size_t item_;
};

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("[mantou_kernels] encoder layer: ") + what);
}

bool fits(const std::vector<float>& v, int n) { return v.empty() || static_cast<int>(v.size()) == n; }

}  // namespace

void check_encoder(const EncoderSpec& s) {
  require(s.qkv && s.out && s.up && s.down, "weights missing");
  const int hidden = s.qkv->layout.k, inner = s.up->layout.rows;
  for (const auto* w : {&s.qkv, &s.out, &s.up, &s.down})
    require((*w)->layout.form == Form::dense && (*w)->layout.experts == 1, "weights are dense matrices");
  require(s.heads >= 1 && hidden % s.heads == 0 && hidden / s.heads <= 4096, "impossible head counts");
  require(s.qkv->layout.rows == 3 * hidden && fits(s.qkv_bias, 3 * hidden), "QKV does not fit");
  require(s.out->layout.k == hidden && s.out->layout.rows == hidden && fits(s.out_bias, hidden),
          "the output projection does not fit");
  require(s.up->layout.k == hidden && fits(s.up_bias, inner), "the up projection does not fit");
  require(s.down->layout.k == inner && s.down->layout.rows == hidden && fits(s.down_bias, hidden),
          "the down projection does not fit");
  require(static_cast<int>(s.attention_norm.size()) == hidden && static_cast<int>(s.norm.size()) == hidden &&
              fits(s.attention_norm_bias, hidden) && fits(s.norm_bias, hidden),
          "a norm has the wrong size");
}

void run_encoder_layer(const Kernels& kernels, const EncoderSpec& spec, const EncoderCall& call) {
  if (call.lengths != nullptr)
    for (int b = 0; b < call.batch; ++b)
      if (call.lengths[b] < 0 || call.lengths[b] > call.tokens)
        throw std::out_of_range("[mantou_kernels] encoder layer: row " + std::to_string(b) + " has " +
                                std::to_string(call.lengths[b]) + " of " + std::to_string(call.tokens) + " tokens");
  EncoderLayer(kernels, spec, call).run();
}

}  // namespace mantou
