// The steps of a decoder layer over one thread's scratch memory.
#include "layer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "scratch.h"

namespace mantou {
namespace {

constexpr int kFewRows = 4;
constexpr size_t kWarmBytes = size_t{256} << 10;

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

// The tokens that are computed, one after the other. Rows that feed fewer than others cost what they feed: padding takes
// part in no product.
class Tokens {
 public:
  explicit Tokens(const LayerCall& c) {
    row.reserve(static_cast<size_t>(c.batch) * c.tokens), token.reserve(row.capacity());
    for (int b = 0; b < c.batch; ++b) {
      first.push_back(static_cast<int>(row.size()));
      const int n = c.count != nullptr ? c.count[b] : c.tokens;
      for (int t = 0; t < n; ++t) row.push_back(b), token.push_back(t);
    }
    padded = static_cast<int>(row.size()) < c.batch * c.tokens;
  }

  int size() const { return static_cast<int>(row.size()); }

  std::vector<int> row, token;  // of each
  std::vector<int32_t> first;   // of each row
  bool padded;                  // whether there are others
};

class Layer {
 public:
  Layer(const Kernels& kernels, const LayerSpec& spec, const LayerCall& call)
      : k_(kernels), s_(spec), c_(call), tokens_(call), rows_(tokens_.size()), hidden_(spec.qkv->layout.k),
        item_(size_of(call.type)) {}

  void run() {
    if (!tokens_.padded) return run(static_cast<const uint8_t*>(c_.x), static_cast<uint8_t*>(c_.out));
    static thread_local Scratch memory;
    uint8_t* x = memory.take(bytes(hidden_));
    const size_t one = hidden_ * item_;
    const auto place = [&](int r) { return (static_cast<size_t>(tokens_.row[r]) * c_.tokens + tokens_.token[r]) * one; };
    for (int r = 0; r < rows_; ++r) std::memcpy(x + r * one, static_cast<const uint8_t*>(c_.x) + place(r), one);
    if (rows_ > 0) run(x, x);
    auto* out = static_cast<uint8_t*>(c_.out);
    std::memset(out, 0, static_cast<size_t>(c_.batch) * c_.tokens * one);
    for (int r = 0; r < rows_; ++r) std::memcpy(out + place(r), x + r * one, one);
  }

 private:
  // x and out: [rows_, hidden], and may be the same.
  void run(const uint8_t* x, uint8_t* out) {
    static thread_local Scratch qkv_memory, attended_memory, hidden_memory, gated_memory;
    const int width = s_.qkv->layout.rows, attended = s_.heads * s_.head_dim, inner = s_.gate_up->layout.rows / 2;
    uint8_t* qkv = qkv_memory.take(bytes(width));
    product(*s_.qkv, x, &s_.input_norm, or_null(s_.qkv_bias), nullptr, qkv);
    warm(*s_.out);
    rotate_and_append(qkv, width);
    uint8_t* mixed = attended_memory.take(bytes(attended));
    attend(qkv, width, mixed);
    uint8_t* h = hidden_memory.take(bytes(hidden_));
    residual_product(*s_.out, mixed, or_null(s_.out_bias), s_.attention_out_norm, x, h);
    warm(*s_.gate_up);
    uint8_t* gated = gated_memory.take(bytes(inner));
    product(*s_.gate_up, h, &s_.mlp_norm, nullptr, nullptr, gated, true);
    warm(*s_.down);
    residual_product(*s_.down, gated, nullptr, s_.mlp_out_norm, h, out);
    if (c_.next != nullptr) warm(*c_.next);
  }

  // A few rows wait for weights, so idle helpers begin to fetch those of the next product: as much as half a cache.
  void warm(const Packed& w) const {
    if (rows_ <= kFewRows) Pool::instance().warm(w.data, std::min(w.nbytes(), kWarmBytes));
  }

  size_t bytes(int width) const { return static_cast<size_t>(rows_) * width * item_; }

  void product(const Packed& w, const void* x, const std::vector<float>* norm, const float* bias, const void* residual,
               void* out, bool gated = false) const {
    LinearCall l;
    l.weights = &w;
    l.x = x;
    l.x_type = l.out_type = c_.type;
    l.num_rows = rows_;
    l.planes = s_.planes;
    if (norm != nullptr) l.norm = norm->data();
    l.norm_eps = s_.eps;
    l.bias = bias;
    l.residual = residual;
    l.gated = gated;
    l.gate = s_.gate;
    l.out = out;
    linear(k_, l);
  }

  // out = residual + [norm](x w): the norm, where there is one, needs the whole row first.
  void residual_product(const Packed& w, const void* x, const float* bias, const std::vector<float>& norm,
                        const void* residual, void* out) const {
    if (norm.empty()) return product(w, x, nullptr, bias, residual, out);
    static thread_local Scratch memory;
    uint8_t* y = memory.take(bytes(hidden_));
    product(w, x, nullptr, bias, nullptr, y);
    Pool::instance().run(rows_, 4, rows_ * hidden_ * 1e-3, [&](int begin, int end) {
      static thread_local Scratch row;
      float *a = row.floats(2 * static_cast<size_t>(hidden_)), *b = a + hidden_;
      for (int r = begin; r < end; ++r) {
        const size_t at = static_cast<size_t>(r) * hidden_;
        k_.load(y, at, c_.type, hidden_, a);
        k_.rms_norm(a, norm.data(), s_.eps, hidden_, c_.type, a);
        k_.load(residual, at, c_.type, hidden_, b);
        k_.add(b, a, hidden_);
        k_.store(b, hidden_, c_.type, out, at);
      }
    });
  }

  // One head: [head norm], [input scale], rotation.
  void rotate(float* v, const std::vector<float>& norm, const float* angles) const {
    if (!norm.empty()) k_.rms_norm(v, norm.data(), s_.eps, s_.head_dim, c_.type, v);
    if (s_.rope_input_scale != 1.0f) {
      for (int i = 0; i < s_.rope_dims; ++i) v[i] *= s_.rope_input_scale;
      k_.round(v, s_.rope_dims, c_.type);
    }
    k_.rope(v, s_.head_dim, s_.rope_dims, s_.rope_traditional, angles, c_.type, v);
  }

  void rotate_and_append(uint8_t* qkv, int width) const {
    const int d = s_.head_dim;
    Pool::instance().run(rows_, 2, rows_ * width * 1e-3, [&](int begin, int end) {
      static thread_local Scratch memory;
      float *v = memory.floats(2 * static_cast<size_t>(d)), *spare = v + d;
      for (int r = begin; r < end; ++r) {
        const int b = tokens_.row[r], t = tokens_.token[r];
        const float* angles = s_.rope->angles(static_cast<int64_t>(c_.start[b]) + t, spare);
        const size_t row = static_cast<size_t>(r) * width;
        for (int h = 0; h < s_.heads; ++h) {
          k_.load(qkv, row + h * d, c_.type, d, v);
          rotate(v, s_.query_norm, angles);
          k_.store(v, d, c_.type, qkv, row + h * d);
        }
        for (int h = 0; h < s_.kv_heads; ++h) {
          const int column = c_.ring > 0 ? (c_.start[b] + t) % c_.ring : c_.start[b] + t;
          k_.load(qkv, row + (s_.heads + h) * d, c_.type, d, v);
          rotate(v, s_.key_norm, angles);
          c_.keys.put(k_, b, h, column, v);
          k_.load(qkv, row + (s_.heads + s_.kv_heads + h) * d, c_.type, d, v);
          c_.values.put(k_, b, h, column, v);
        }
      }
    });
  }

  void attend(const uint8_t* qkv, int width, uint8_t* out) const {
    AttentionCall a;
    a.batch = c_.batch, a.tokens = c_.tokens, a.heads = s_.heads, a.kv_heads = s_.kv_heads;
    a.head_dim = a.value_dim = s_.head_dim;
    a.keys = 0;  // up to the last column in use: more would only cost scratch memory
    for (int b = 0; b < c_.batch; ++b) a.keys = std::max(a.keys, std::min(c_.start[b] + c_.tokens, c_.keys.reach()));
    a.table = c_.keys.table;
    a.scale = s_.scale;
    a.q.data = qkv;
    a.q.type = c_.type;
    a.q.element_bytes = static_cast<int>(item_);
    a.q.stride[0] = static_cast<int64_t>(c_.tokens) * width, a.q.stride[1] = s_.head_dim, a.q.stride[2] = width;
    a.k = c_.keys.view(), a.v = c_.values.view();
    a.k_groups = c_.keys.groups(), a.v_groups = c_.values.groups();
    a.round = a.out_type = c_.type;
    a.count = c_.count;
    if (tokens_.padded) a.first = tokens_.first.data();
    if (c_.ring > 0) {
      a.keys = c_.ring;
      a.mask = c_.mask;
      a.has_mask = a.mask_is_bool = true;
    } else {
      a.start = c_.start;
      a.window = c_.window;
    }
    a.out = out;
    attention(k_, a);
  }

  const Kernels& k_;
  const LayerSpec& s_;
  const LayerCall& c_;
  const Tokens tokens_;
  const int rows_, hidden_;
  const size_t item_;
};

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("[mantou_kernels] layer: ") + what);
}

bool fits(const std::vector<float>& v, int n) { return v.empty() || static_cast<int>(v.size()) == n; }

}  // namespace

void check_layer(const LayerSpec& s) {
  require(s.qkv && s.out && s.gate_up && s.down && s.rope, "weights or rotary table missing");
  const int hidden = s.qkv->layout.k, inner = s.gate_up->layout.rows / 2;
  require(s.heads >= 1 && s.kv_heads >= 1 && s.heads % s.kv_heads == 0 && s.head_dim >= 1 && s.head_dim <= 4096,
          "impossible head counts");
  require(s.qkv->layout.rows == (s.heads + 2 * s.kv_heads) * s.head_dim, "QKV rows and heads differ");
  require(s.out->layout.k == s.heads * s.head_dim && s.out->layout.rows == hidden, "the output projection does not fit");
  require(s.gate_up->layout.k == hidden && s.gate_up->layout.rows % (2 * kBlockRows) == 0, "gate and up do not fit");
  require(s.down->layout.k == inner && s.down->layout.rows == hidden, "the down projection does not fit");
  require(static_cast<int>(s.input_norm.size()) == hidden && static_cast<int>(s.mlp_norm.size()) == hidden &&
              fits(s.attention_out_norm, hidden) && fits(s.mlp_out_norm, hidden) && fits(s.query_norm, s.head_dim) &&
              fits(s.key_norm, s.head_dim),
          "a norm has the wrong size");
  require(fits(s.qkv_bias, s.qkv->layout.rows) && fits(s.out_bias, hidden), "a bias has the wrong size");
  require(s.rope_dims >= 2 && s.rope_dims % 2 == 0 && s.rope_dims <= s.head_dim, "impossible rotary dimensions");
  require(s.planes == 1 || s.planes == 2, "planes is 1 or 2");
}

void run_layer(const Kernels& kernels, const LayerSpec& spec, const LayerCall& call) {
  for (int b = 0; b < call.batch; ++b) {
    const int n = call.count != nullptr ? call.count[b] : call.tokens;
    const int64_t room = call.ring > 0 ? INT32_MAX : call.keys.reach();
    if (n < 0 || n > call.tokens || call.start[b] < 0 || call.start[b] + int64_t{n} > room ||
        (n > 0 && call.ring == 0 && !call.keys.table.fits(b, call.start[b] + n, call.keys.capacity)))
      throw std::out_of_range("[mantou_kernels] layer: row " + std::to_string(b) + " would write columns " +
                              std::to_string(call.start[b]) + ".." + std::to_string(call.start[b] + n) + " of " +
                              std::to_string(call.keys.capacity));
  }
  Layer(kernels, spec, call).run();
}

}  // namespace mantou
