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
constexpr int kPartRows = 112;  // a thread's tokens of a long prompt: opening weights costs little beside so many
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
        width_(spec.qkv->layout.rows), attended_(spec.heads * spec.head_dim), inner_(spec.gate_up->layout.rows / 2),
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
  // Consecutive rows of the call, and who computes them.
  struct Part {
    int begin, end;
    Hands hands;
    int size() const { return end - begin; }
  };

  // What the steps leave for each other, [rows_, ...].
  struct Buffers {
    uint8_t *qkv, *mixed, *h, *gated;
  };

  // x and out: [rows_, hidden], and may be the same.
  void run(const uint8_t* x, uint8_t* out) {
    static thread_local Scratch qkv_memory, attended_memory, hidden_memory, gated_memory;
    const Buffers to = {qkv_memory.take(bytes(width_)), attended_memory.take(bytes(attended_)),
                        hidden_memory.take(bytes(hidden_)), gated_memory.take(bytes(inner_))};
    const int parts = num_parts();
    if (parts < 2) {
      const Part all = {0, rows_, Hands::pool};
      project(all, x, to);
      return finish(all, x, to, out);
    }
    each(parts, [&](const Part& part) { project(part, x, to); });  // all keys are there before any is looked at
    each(parts, [&](const Part& part) { finish(part, x, to, out); });
  }

  // Many tokens of one row: a thread takes some of them through all steps, and finds in its own cache what it has just
  // written. Threads that share every product send each other all that lies between the products. Less than two parts
  // = they do share them; else each thread gets as many.
  int num_parts() const {
    if (c_.batch != 1 || tokens_.padded || c_.ring > 0) return 1;
    const int threads = Pool::instance().threads();
    return rows_ / kPartRows / threads * threads;
  }

  template <class F>
  void each(int parts, F&& f) const {
    const double products = static_cast<double>(width_ + hidden_ + 3 * inner_) * hidden_;
    Pool::instance().run(parts, 1, rows_ * products / 60e3, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const int part = parts - 1 - i;  // the last tokens see the most keys: they come first
        f({cut(part, parts), cut(part + 1, parts), Hands::own});
      }
    });
  }

  // Where a part begins: at a tile's first row, with as many tiles in each.
  int cut(int part, int parts) const {
    const int tiles = (rows_ + kAffineTile - 1) / kAffineTile;
    return std::min(rows_, tiles * part / parts * kAffineTile);
  }

  void project(const Part& part, const uint8_t* x, const Buffers& to) const {
    product(part, *s_.qkv, of(part, x, hidden_), &s_.input_norm, or_null(s_.qkv_bias), nullptr, of(part, to.qkv, width_));
    warm(*s_.out);
    rotate_and_append(part, to.qkv);
  }

  void finish(const Part& part, const uint8_t* x, const Buffers& to, uint8_t* out) const {
    uint8_t* mixed = of(part, to.mixed, attended_);
    uint8_t* h = of(part, to.h, hidden_);
    uint8_t* gated = of(part, to.gated, inner_);
    attend(part, of(part, to.qkv, width_), mixed);
    residual_product(part, *s_.out, mixed, or_null(s_.out_bias), s_.attention_out_norm, of(part, x, hidden_), h);
    warm(*s_.gate_up);
    product(part, *s_.gate_up, h, &s_.mlp_norm, nullptr, nullptr, gated, true);
    warm(*s_.down);
    residual_product(part, *s_.down, gated, nullptr, s_.mlp_out_norm, h, of(part, out, hidden_));
    if (c_.next != nullptr) warm(*c_.next);
  }

  // A few rows wait for weights, so idle helpers begin to fetch those of the next product: as much as half a cache.
  void warm(const Packed& w) const {
    if (rows_ <= kFewRows) Pool::instance().warm(w.data, std::min(w.nbytes(), kWarmBytes));
  }

  size_t bytes(int width) const { return static_cast<size_t>(rows_) * width * item_; }

  // The part's rows of a buffer.
  template <class Byte>
  Byte* of(const Part& part, Byte* rows, int width) const {
    return rows + static_cast<size_t>(part.begin) * width * item_;
  }

  // x, residual and out: the part's rows.
  void product(const Part& part, const Packed& w, const uint8_t* x, const std::vector<float>* norm, const float* bias,
               const uint8_t* residual, uint8_t* out, bool gated = false) const {
    LinearCall l;
    l.weights = &w;
    l.x = x;
    l.x_type = l.out_type = c_.type;
    l.num_rows = part.size();
    l.planes = s_.planes;
    if (norm != nullptr) l.norm = norm->data();
    l.norm_eps = s_.eps;
    l.bias = bias;
    l.residual = residual;
    l.gated = gated;
    l.gate = s_.gate;
    l.out = out;
    linear(k_, l, part.hands);
  }

  // out = residual + [norm](x w): the norm, where there is one, needs the whole row first.
  void residual_product(const Part& part, const Packed& w, const uint8_t* x, const float* bias,
                        const std::vector<float>& norm, const uint8_t* residual, uint8_t* out) const {
    if (norm.empty()) return product(part, w, x, nullptr, bias, residual, out);
    static thread_local Scratch memory;
    uint8_t* y = memory.take(static_cast<size_t>(part.size()) * hidden_ * item_);
    product(part, w, x, nullptr, bias, nullptr, y);
    run_with(part.hands, part.size(), 4, part.size() * hidden_ * 1e-3, [&](int begin, int end) {
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

  // qkv: of all rows, since each row has its own place in the KV.
  void rotate_and_append(const Part& part, uint8_t* qkv) const {
    const int d = s_.head_dim;
    run_with(part.hands, part.size(), 2, part.size() * width_ * 1e-3, [&](int begin, int end) {
      static thread_local Scratch memory;
      float *v = memory.floats(2 * static_cast<size_t>(d)), *spare = v + d;
      for (int r = part.begin + begin; r < part.begin + end; ++r) {
        const int b = tokens_.row[r], t = tokens_.token[r];
        const float* angles = s_.rope->angles(static_cast<int64_t>(c_.start[b]) + t, spare);
        const size_t row = static_cast<size_t>(r) * width_;
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

  // A part that is not all of the rows is some tokens of the only row of the batch, from position `start` on.
  void attend(const Part& part, const uint8_t* qkv, uint8_t* out) const {
    const bool whole = part.size() == rows_;
    const int32_t start = c_.start[0] + part.begin;
    AttentionCall a;
    a.batch = c_.batch, a.tokens = whole ? c_.tokens : part.size(), a.heads = s_.heads, a.kv_heads = s_.kv_heads;
    a.head_dim = a.value_dim = s_.head_dim;
    a.start = whole ? c_.start : &start;
    a.keys = 0;  // up to the last column in use: more would only cost scratch memory
    for (int b = 0; b < c_.batch; ++b) a.keys = std::max(a.keys, std::min(a.start[b] + a.tokens, c_.keys.reach()));
    a.table = c_.keys.table;
    a.scale = s_.scale;
    a.q.data = qkv;
    a.q.type = c_.type;
    a.q.element_bytes = static_cast<int>(item_);
    a.q.stride[0] = static_cast<int64_t>(a.tokens) * width_, a.q.stride[1] = s_.head_dim, a.q.stride[2] = width_;
    a.k = c_.keys.view(), a.v = c_.values.view();
    a.k_groups = c_.keys.groups(), a.v_groups = c_.values.groups();
    a.round = a.out_type = c_.type;
    a.count = whole ? c_.count : nullptr;
    if (tokens_.padded) a.first = tokens_.first.data();
    if (c_.ring > 0) {
      a.start = nullptr;
      a.keys = c_.ring;
      a.mask = c_.mask;
      a.has_mask = a.mask_is_bool = true;
    } else {
      a.window = c_.window;
    }
    a.out = out;
    attention(k_, a, part.hands);
  }

  const Kernels& k_;
  const LayerSpec& s_;
  const LayerCall& c_;
  const Tokens tokens_;
  const int rows_, hidden_, width_, attended_, inner_;  // width_: of q, k and v; inner_: of the MLP
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
