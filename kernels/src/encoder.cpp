// Who computes which rows of an encoder, over a thread's scratch memory.
#include "encoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "scratch.h"

namespace mantou {
namespace {

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

struct Range {
  int begin, end;
  int count() const { return end - begin; }
};

// Only the tokens that there are become rows, each sequence's behind the one before; attention alone looks beyond a
// row. Where the batch has sequences enough, a thread takes some of them through all layers and meets the others at the
// end. Otherwise all meet twice a layer: where QKV is complete and where the layer is. Of a few rows the threads share
// the weights instead, since those are most of what is read.
class Encoder {
 public:
  Encoder(const Kernels& kernels, const EncoderCall& call)
      : k_(kernels), c_(call), hidden_((*call.layers)[0]->qkv->layout.k), item_(size_of(call.type)), first_{0} {
    for (int b = 0; b < c_.batch; ++b)
      first_.push_back(first_.back() + (c_.lengths != nullptr ? c_.lengths[b] : c_.tokens));
  }

  void run() {
    static thread_local Scratch x_memory, qkv_memory;
    const int threads = Pool::instance().threads();
    if (num_rows() >= kManyTiles * k_.dense_width) {
      hands_ = Hands::own;
      const std::vector<Range> groups = sequences(threads);
      if (static_cast<int>(groups.size()) >= 2 * threads) return each(groups, cost_us(), [&](Range g) { alone(g); });
    }
    uint8_t* x = x_memory.take(bytes(num_rows(), hidden_));
    uint8_t* qkv = qkv_memory.take(bytes(num_rows(), 3 * hidden_));
    gather({0, num_rows()}, x);
    const int share = std::clamp(num_rows() / (2 * threads) + 1, k_.dense_width, kSlab);
    const std::vector<Range> slabs = cut({0, num_rows()}, hands_ == Hands::own ? share : num_rows());
    const double layer_us = cost_us() / static_cast<double>(c_.layers->size());
    for (const auto& layer : *c_.layers) {
      each(slabs, layer_us / 3, [&](Range rows) { project(*layer, rows.count(), from(x, rows), qkv_of(qkv, rows)); });
      each(slabs, layer_us * 2 / 3, [&](Range rows) { attend_and_finish(*layer, rows, qkv, 0, from(x, rows)); });
    }
    scatter({0, num_rows()}, x);
  }

 private:
  static constexpr int kManyTiles = 2;  // micro-tiles from which rows are shared among the threads
  static constexpr int kSlab = 96;      // rows whose values, 1536 wide, stay in a second-level cache
  static constexpr int kGroup = 192;    // rows that a thread takes through all layers, reading all the weights for them

  int num_rows() const { return first_.back(); }
  size_t bytes(int rows, int width) const { return static_cast<size_t>(rows) * width * item_; }
  uint8_t* from(uint8_t* x, Range rows) const { return x + bytes(rows.begin, hidden_); }
  uint8_t* qkv_of(uint8_t* qkv, Range rows) const { return qkv + bytes(rows.begin, 3 * hidden_); }

  double cost_us() const {
    double products = 0;
    for (const auto& s : *c_.layers) products += 4.0 * hidden_ * hidden_ + 2.0 * hidden_ * s->up->layout.rows;
    return num_rows() * products / 60e3;
  }

  template <class F>
  void each(const std::vector<Range>& items, double cost_us, F&& f) const {
    if (items.size() == 1) return f(items[0]);  // outside the pool, which what it calls may use
    Pool::instance().run(static_cast<int>(items.size()), 1, cost_us, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) f(items[i]);
    });
  }

  // All layers for the sequences whose rows these are.
  void alone(Range rows) const {
    static thread_local Scratch x_memory, qkv_memory;
    uint8_t* x = x_memory.take(bytes(rows.count(), hidden_));
    uint8_t* qkv = qkv_memory.take(bytes(rows.count(), 3 * hidden_));
    gather(rows, x);
    const std::vector<Range> slabs = cut({0, rows.count()}, kSlab);
    for (const auto& layer : *c_.layers) {
      for (const Range& s : slabs) project(*layer, s.count(), from(x, s), qkv_of(qkv, s));
      for (const Range& s : slabs)
        attend_and_finish(*layer, {rows.begin + s.begin, rows.begin + s.end}, qkv, rows.begin, from(x, s));
    }
    scatter(rows, x);
  }

  // Groups of whole sequences with nearly equal numbers of rows, as many as there are turns of all threads.
  std::vector<Range> sequences(int threads) const {
    const int turns = std::max(2, (num_rows() + kGroup * threads - 1) / (kGroup * threads)), count = turns * threads;
    std::vector<Range> found;
    for (int i = 1, begin = 0; i <= count; ++i) {
      const auto aim = static_cast<int>(static_cast<int64_t>(num_rows()) * i / count);
      const int end = *std::lower_bound(first_.begin(), first_.end(), aim);
      if (end > begin) found.push_back({begin, end});
      begin = end;
    }
    return found;
  }

  // Parts of nearly equal size, of at most `most` rows, cut at multiples of what the kernels take at once.
  std::vector<Range> cut(Range rows, int most) const {
    const int unit = k_.dense_width, units = (rows.count() + unit - 1) / unit;
    const int parts = rows.count() == 0 ? 0 : (rows.count() + most - 1) / most;
    std::vector<Range> found;
    for (int i = 0; i < parts; ++i)
      found.push_back({rows.begin + units * i / parts * unit,
                       std::min(rows.end, rows.begin + units * (i + 1) / parts * unit)});
    return found;
  }

  // Calls f(sequence, its first token, tokens, index) for the pieces of sequences in `rows`; index 0 = rows.begin.
  template <class F>
  void each_piece(Range rows, F&& f) const {
    auto b = static_cast<int>(std::upper_bound(first_.begin(), first_.end(), rows.begin) - first_.begin()) - 1;
    for (int row = rows.begin; row < rows.end; ++b) {
      const int end = std::min(rows.end, first_[b + 1]);
      if (end > row) f(b, row - first_[b], end - row, row - rows.begin);
      row = end;
    }
  }

  void gather(Range rows, uint8_t* x) const {
    each_piece(rows, [&](int b, int token, int count, int index) {
      std::memcpy(x + bytes(index, hidden_), static_cast<const uint8_t*>(c_.x) + bytes(b * c_.tokens + token, hidden_),
                  bytes(count, hidden_));
    });
  }

  void scatter(Range rows, const uint8_t* x) const {
    each_piece(rows, [&](int b, int token, int count, int index) {
      std::memcpy(static_cast<uint8_t*>(c_.out) + bytes(b * c_.tokens + token, hidden_), x + bytes(index, hidden_),
                  bytes(count, hidden_));
    });
  }

  void project(const EncoderSpec& s, int num_rows, const uint8_t* x, uint8_t* qkv) const {
    product(s, *s.qkv, num_rows, x, s.qkv_bias, nullptr, qkv);
  }

  // Everything behind QKV, whose row `first` is where `qkv` begins. x: these rows' input, then their output.
  void attend_and_finish(const EncoderSpec& s, Range rows, const uint8_t* qkv, int first, uint8_t* x) const {
    static thread_local Scratch attended_memory, hidden_memory, inner_memory;
    const int n = rows.count();
    uint8_t* attended = attended_memory.take(bytes(n, hidden_));
    each_piece(rows, [&](int b, int token, int count, int index) {
      attend(s, qkv + bytes(first_[b] - first, 3 * hidden_), first_[b + 1] - first_[b], token, count,
             attended + bytes(index, hidden_));
    });
    uint8_t* h = hidden_memory.take(bytes(n, hidden_));
    product(s, *s.out, n, attended, s.out_bias, x, h);
    normalise(s.attention_norm, s.attention_norm_bias, s.eps, n, h);
    uint8_t* inner = inner_memory.take(bytes(n, s.up->layout.rows));
    product(s, *s.up, n, h, s.up_bias, nullptr, inner, true);
    product(s, *s.down, n, inner, s.down_bias, h, x);
    normalise(s.norm, s.norm_bias, s.eps, n, x);
  }

  void product(const EncoderSpec& s, const Packed& w, int num_rows, const void* x, const std::vector<float>& bias,
               const void* residual, void* out, bool activated = false) const {
    LinearCall l;
    l.weights = &w;
    l.x = x;
    l.x_type = l.out_type = c_.type;
    l.num_rows = num_rows;
    l.bias = or_null(bias);
    l.activated = activated;
    l.gate = s.activation;
    l.residual = residual;
    l.out = out;
    linear(k_, l, hands_);
  }

  void normalise(const std::vector<float>& weight, const std::vector<float>& bias, float eps, int num_rows,
                 void* x) const {
    static thread_local Scratch memory;
    float* row = memory.floats(hidden_);
    for (int r = 0; r < num_rows; ++r) {
      const size_t at = static_cast<size_t>(r) * hidden_;
      k_.load(x, at, c_.type, hidden_, row);
      k_.layer_norm(row, weight.data(), or_null(bias), eps, hidden_, c_.type, row);
      k_.store(row, hidden_, c_.type, x, at);
    }
  }

  // `count` tokens of a sequence from `token` on, which see all its `length`. The rows of QKV lie whole pages apart, so
  // that a head's keys and values share few sets of the cache: they are copied side by side.
  void attend(const EncoderSpec& s, const uint8_t* qkv, int length, int token, int count, uint8_t* out) const {
    static thread_local Scratch memory;
    const int dim = hidden_ / s.heads;
    uint8_t* rows = memory.take(2 * bytes(length, hidden_));
    for (int j = 0; j < length; ++j)
      for (int part = 0; part < 2; ++part)
        for (int h = 0; h < s.heads; ++h)
          std::memcpy(rows + bytes((part * s.heads + h) * length + j, dim),
                      qkv + bytes(j * 3 + 1 + part, hidden_) + bytes(h, dim), bytes(1, dim));
    AttentionCall a;
    a.batch = 1, a.tokens = count, a.keys = length, a.heads = a.kv_heads = s.heads;
    a.head_dim = a.value_dim = dim;
    a.scale = s.scale;
    for (View4* v : {&a.q, &a.k, &a.v}) {
      v->type = c_.type;
      v->element_bytes = static_cast<int>(item_);
      v->stride[1] = static_cast<int64_t>(length) * dim, v->stride[2] = dim;
    }
    a.k.data = rows, a.v.data = rows + bytes(length, hidden_);
    a.q.data = qkv + bytes(token, 3 * hidden_), a.q.stride[1] = dim, a.q.stride[2] = 3 * hidden_;
    a.round = a.out_type = c_.type;
    a.out = out;
    attention(k_, a, hands_);
  }

  const Kernels& k_;
  const EncoderCall& c_;
  const int hidden_;
  const size_t item_;
  std::vector<int> first_;  // row of each sequence's first token, and the number of rows
  Hands hands_ = Hands::pool;
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

void run_encoder(const Kernels& kernels, const EncoderCall& call) {
  const size_t token_bytes = (*call.layers)[0]->qkv->layout.k * size_of(call.type);
  for (int b = 0; b < call.batch && call.lengths != nullptr; ++b) {
    if (call.lengths[b] < 0 || call.lengths[b] > call.tokens)
      throw std::out_of_range("[mantou_kernels] encoder: row " + std::to_string(b) + " has " +
                              std::to_string(call.lengths[b]) + " of " + std::to_string(call.tokens) + " tokens");
    const size_t end = static_cast<size_t>(b) * call.tokens + call.lengths[b];
    std::memset(static_cast<uint8_t*>(call.out) + end * token_bytes, 0, (call.tokens - call.lengths[b]) * token_bytes);
  }
  Encoder(kernels, call).run();
}

}  // namespace mantou
