// What a draw may pick, and what it picks. The filters of mantou/sampling/filters.py each keep the tokens from some
// log-probability on, so one bound says it all.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace mantou {
namespace {

// As in noise.py, which names the source.
uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

struct Noise {
  uint32_t low, high;
  explicit Noise(const DrawTask& t)
      : low(mix(t.seed_words[0] ^ mix(t.position + 0x9E3779B9u))), high(mix(t.seed_words[1] + low)) {}
  float gumbel(int index) const {
    const uint32_t bits = mix(mix(static_cast<uint32_t>(index) + low) ^ high);
    return -std::log(-std::log(static_cast<float>(bits >> 9) * 0x1p-23f + 0x1p-24f));
  }
};

class Row {
 public:
  Row(const DrawKernels& kernels, const DrawTask& task)
      : k_(kernels), t_(task), logits_(task.logits), n_(task.vocab) {
    static thread_local Scratch memory;
    const size_t n = static_cast<size_t>(n_);
    logprobs_ = memory.floats(6 * n);
    probs_ = logprobs_ + n;
    bucket_ = reinterpret_cast<int32_t*>(probs_ + n);
    units_ = bucket_ + n;
    index_ = units_ + n;
    if (t_.allowed == nullptr) return;
    float* restricted = reinterpret_cast<float*>(index_ + n);
    k_.restrict(t_.logits, t_.allowed, n_, restricted);
    logits_ = restricted;
  }

  void run() {
    const bool filtered = t_.sampled && (t_.top_p < 1.0f || t_.min_p_log > -INFINITY || t_.top_k < n_);
    if (filtered || t_.num_top >= 0) normalise();
    *t_.token = t_.sampled ? sampled(filtered ? logprobs_ : nullptr, filtered ? bound() : 0.0f) : most_likely();
    if (t_.num_top < 0) return;
    *t_.logprob = logprobs_[*t_.token];
    alternatives();
  }

 private:
  void normalise() {
    const float highest = k_.highest(logits_, n_);
    k_.exp(logits_, highest, n_, probs_);
    const float sum =
        std::isinf(highest) ? highest : std::log(k_.add_in_order(0.0f, probs_, n_)) + highest;
    for (int i = 0; i < n_; ++i) logprobs_[i] = logits_[i] - sum;
  }

  float bound() {
    float bound = -INFINITY;
    if (t_.top_p < 1.0f) bound = nucleus();
    const float highest = k_.highest(logprobs_, n_);
    bound = std::max(bound, highest + t_.min_p_log);
    return t_.top_k < n_ ? kth(highest, bound) : bound;
  }

  // Values of the first `count` tokens in index_, largest first.
  const std::vector<float>& descending(int count) {
    values_.resize(count);
    for (int i = 0; i < count; ++i) values_[i] = logprobs_[index_[i]];
    std::sort(values_.begin(), values_.end(), std::greater<float>());
    return values_;
  }

  // s + e^v for v in `values` until it reaches `wanted`: the sum, and the last value that was added.
  std::pair<float, float> add(float s, const std::vector<float>& values, float wanted = INFINITY) {
    float some[64], last = -INFINITY;
    for (size_t i = 0; i < values.size(); i += 64) {
      const size_t count = std::min<size_t>(64, values.size() - i);
      k_.exp(values.data() + i, 0.0f, static_cast<int>(count), some);
      for (size_t j = 0; j < count; ++j) {
        s += some[j];
        last = values[i + j];
        if (s >= wanted) return {s, last};
      }
    }
    return {s, last};
  }

  // The log-probability from which on the most likely tokens reach top_p of the sum of all. Plain MLX sorts all and adds
  // one after the other. The head is done so here; in the tail, whose sum stays in one binade, the order within a bucket
  // is free, and only those buckets are sorted where that fails or the bound lies.
  float nucleus() {
    k_.exp(logprobs_, 0.0f, n_, probs_);
    head_ = descending(k_.select_from(logprobs_, n_, Buckets::kHead, index_));
    float head = add(0.0f, head_).first;
    if (head < 0.5f) {  // nearly uniform: all are the head
      head_ = descending(k_.select_from(logprobs_, n_, -88.0f, index_));
      return add(0.0f, head_, t_.top_p * add(0.0f, head_).first).second;
    }
    const float wanted = t_.top_p * tail(head);
    if (head >= wanted) return add(0.0f, head_, wanted).second;
    int b = 0;
    while (b + 1 < Buckets::kCount && begin_[b + 1] < wanted) ++b;
    return add(begin_[b], descending(k_.select_equal(bucket_, n_, b, index_)), wanted).second;
  }

  void fill(float scale) {
    k_.bucket(logprobs_, probs_, n_, scale, bucket_, units_);
    std::fill(sum_, sum_ + Buckets::kCount + 1, 0);
    for (int i = 0; i < n_; ++i)  // ties are counted above bit 40
      sum_[bucket_[i]] += static_cast<uint64_t>(units_[i] / Buckets::kTie) << 40 |
                          static_cast<uint64_t>(units_[i] % Buckets::kTie);
  }

  // The sum of all after that of the head, at least 1/2. begin_[b] becomes the sum before bucket b.
  float tail(float s) {
    float scale = s < 1.0f ? 0x1p24f : 0x1p23f;
    fill(scale);
    for (int b = 0; b < Buckets::kCount; ++b) {
      begin_[b] = s;
      if (sum_[b] == 0) continue;
      const int64_t units = static_cast<int64_t>(s * scale) + static_cast<int64_t>(sum_[b] & 0xffffffffff);
      if (sum_[b] >> 40 == 0 && units < 1 << 24) {
        s = static_cast<float>(units) / scale;
        continue;
      }
      s = add(s, descending(k_.select_equal(bucket_, n_, b, index_))).first;
      if (s >= 1.0f && scale == 0x1p24f) fill(scale = 0x1p23f);
    }
    return s;
  }

  // The k-th largest of the values from `bound` on, or `bound` if there are not so many.
  float kth(float highest, float bound) {
    for (const float depth : {5.0f, 10.0f, INFINITY}) {
      const float from = std::max(bound, highest - depth);
      const int count = k_.select_from(logprobs_, n_, from, index_);
      if (count >= t_.top_k) {
        values_.resize(count);
        for (int i = 0; i < count; ++i) values_[i] = logprobs_[index_[i]];
        std::nth_element(values_.begin(), values_.begin() + (t_.top_k - 1), values_.end(), std::greater<float>());
        return values_[t_.top_k - 1];
      }
      if (from == bound) break;
    }
    return bound;
  }

  // The first of the largest logits / temperature + noise. Approximate scores leave the few that can win.
  int32_t sampled(const float* key, float bound) {
    const Noise noise(t_);
    const float gain = t_.inverse_temperature;
    int32_t best = 0;
    float best_score = -INFINITY;
    const auto weigh = [&](int count) {
      for (int c = 0; c < count; ++c) {
        const int32_t i = index_[c];
        if (key != nullptr && key[i] == -INFINITY) continue;
        const float score = logits_[i] * gain + noise.gumbel(i);
        if (score > best_score) best_score = score, best = i;
      }
    };
    constexpr int kFew = 1024;  // below, libm for all is as quick
    if (key != nullptr)
      if (const int count = k_.select_from(key, n_, bound, index_); count <= kFew) return weigh(count), best;
    k_.scores(logits_, gain, noise.low, noise.high, key, bound, n_, probs_);
    const float highest = k_.highest(probs_, n_);
    if (highest == -INFINITY) return 0;
    const float slack = 1e-4f + std::fabs(highest) * 0x1p-20f;
    weigh(k_.select_from(probs_, n_, highest - slack, index_));
    return best;
  }

  int32_t most_likely() {
    const int count = k_.select_from(logits_, n_, k_.highest(logits_, n_), index_);
    return count > 0 ? index_[0] : 0;
  }

  void alternatives() {
    const int wanted = std::min(t_.num_top, n_);
    if (wanted == 0) return;
    const float highest = k_.highest(logprobs_, n_);
    int count = 0;
    for (const float depth : {5.0f, 10.0f, INFINITY}) {
      count = k_.select_from(logprobs_, n_, highest - depth, index_);
      if (count >= wanted) break;
    }
    if (count < wanted) {  // not-a-number compares with nothing: any order will do, but there must be one
      count = n_;
      std::iota(index_, index_ + n_, 0);
    }
    const auto above = [this](int32_t a, int32_t b) {
      return logprobs_[a] > logprobs_[b] || (logprobs_[a] == logprobs_[b] && a < b);
    };
    std::partial_sort(index_, index_ + wanted, index_ + count, above);
    for (int i = 0; i < wanted; ++i) {
      t_.top_tokens[i] = index_[i];
      t_.top_logprobs[i] = logprobs_[index_[i]];
    }
  }

  const DrawKernels& k_;
  const DrawTask& t_;
  const float* logits_;
  const int n_;
  float *logprobs_, *probs_;
  int32_t *bucket_, *units_, *index_;
  std::vector<float> head_, values_;
  uint64_t sum_[Buckets::kCount + 1];
  float begin_[Buckets::kCount + 1];
};

}  // namespace

void draw(const Kernels& kernels, const DrawTask& task) { Row(kernels.draw, task).run(); }

}  // namespace mantou
