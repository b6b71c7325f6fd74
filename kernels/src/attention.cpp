// Cuts attention into tasks of one key-value head and a few tokens, and hands each to the kernel.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "scratch.h"

namespace mantou {
namespace {

struct Range {
  int first, last;
};

Range visible(const AttentionCall& c, int b, int t) {
  int last = c.keys, first = 0;
  if (c.count != nullptr && t >= c.count[b]) return {0, 0};
  if (c.start != nullptr) {
    last = c.start[b] + t + 1;
  } else if (c.causal) {
    last = c.keys - c.tokens + t + 1;
  } else if (c.lengths != nullptr) {
    last = c.lengths[b];
  }
  if (c.window > 0) first = last - c.window;
  last = std::clamp(last, 0, c.keys);
  return {std::clamp(first, 0, last), last};
}

// The last key that the row's bool mask allows bounds the work; hidden keys behind it are never read.
int last_allowed(const uint8_t* allowed, Range r) {
  int last = r.last;
  while (last > r.first && !allowed[last - 1]) --last;
  return last;
}

// The queries of a task. A thread keeps the memory: short rows have a task every few microseconds.
struct Lists {
  std::vector<const float*> queries;
  std::vector<float*> results;
  std::vector<int> first, last, tokens, heads;
  std::vector<const uint8_t*> allowed;
  std::vector<const void*> bias;
  std::vector<float> sinks;

  void clear() {
    queries.clear(), results.clear(), first.clear(), last.clear(), tokens.clear(), heads.clear();
    allowed.clear(), bias.clear(), sinks.clear();
  }
};

Lists& lists() {
  static thread_local Lists of_thread;
  return of_thread;
}

class Task {
 public:
  Task(const Kernels& kernels, const AttentionCall& call, int b, int kv_head, int t0, int t1, int h0, int h1)
      : kernels_(kernels), c_(call), b_(b), kv_head_(kv_head), l_(lists()) {
    const int padded = (c_.head_dim + 15) / 16 * 16;
    const int count = (t1 - t0) * (h1 - h0);
    static thread_local Scratch rows, scores;
    l_.clear();
    q_ = rows.floats(static_cast<size_t>(count) * (padded + c_.value_dim));
    out_ = q_ + static_cast<size_t>(count) * padded;
    std::fill(q_, out_, 0.0f);
    for (int t = t0; t < t1; ++t)
      for (int h = h0; h < h1; ++h) add_query(t, h, padded);
    run(scores.floats(attend_scratch_floats(count, c_.head_dim, c_.value_dim, c_.keys)));
  }

 private:
  void add_query(int t, int h, int padded) {
    const int i = static_cast<int>(l_.queries.size());
    float* q = q_ + static_cast<size_t>(i) * padded;
    const void* from = c_.first == nullptr ? c_.q.at(b_, h, t) : c_.q.at(0, h, c_.first[b_] + t);
    kernels_.load(from, 0, c_.q.type, c_.head_dim, q);
    for (int d = 0; d < c_.head_dim; ++d) q[d] *= c_.scale;
    kernels_.round(q, c_.head_dim, c_.round);
    Range range = visible(c_, b_, t);
    const void* mask = c_.has_mask ? c_.mask.at(b_, h, t) : nullptr;
    if (mask != nullptr && c_.mask_is_bool) {
      range.last = last_allowed(static_cast<const uint8_t*>(mask), range);
      l_.allowed.push_back(static_cast<const uint8_t*>(mask));
    } else if (mask != nullptr) {
      l_.bias.push_back(mask);
    }
    l_.queries.push_back(q);
    l_.results.push_back(out_ + static_cast<size_t>(i) * c_.value_dim);
    l_.first.push_back(range.first);
    l_.last.push_back(range.last);
    l_.tokens.push_back(t);
    l_.heads.push_back(h);
    if (c_.sinks != nullptr) l_.sinks.push_back(c_.sinks[h]);
  }

  void run(float* scratch) {
    const int count = static_cast<int>(l_.queries.size());
    kernels_.attend({l_.queries.data(), count, c_.k.at(b_, kv_head_, 0), c_.v.at(b_, kv_head_, 0), c_.k.stride[2],
                     c_.v.stride[2], c_.k.type, c_.head_dim, c_.value_dim, l_.first.data(), l_.last.data(),
                     l_.allowed.empty() ? nullptr : l_.allowed.data(), l_.bias.empty() ? nullptr : l_.bias.data(),
                     c_.mask.type, l_.sinks.empty() ? nullptr : l_.sinks.data(), c_.round, l_.results.data(), scratch,
                     c_.k_groups.at(b_, kv_head_), c_.v_groups.at(b_, kv_head_), c_.table.row(b_), c_.table.shift});
    for (int i = 0; i < count; ++i) {
      const size_t first = c_.first == nullptr ? static_cast<size_t>(b_) * c_.tokens : c_.first[b_];
      const size_t row = (first + l_.tokens[i]) * c_.heads + l_.heads[i];
      kernels_.store(l_.results[i], c_.value_dim, c_.out_type, c_.out, row * c_.value_dim);
    }
  }

  const Kernels& kernels_;
  const AttentionCall& c_;
  const int b_, kv_head_;
  float *q_, *out_;
  Lists& l_;
};

}  // namespace

void attention(const Kernels& kernels, const AttentionCall& c, Hands hands) {
  const int group = c.heads / c.kv_heads, threads = Pool::instance().threads();
  // Scores of a task should stay in cache: 512 Ki floats. With a quarter of that a prompt of 7,900 tokens takes 1.2 times
  // as long, since each task reads all keys and values. One thread has no use for small tasks either.
  const int chunk = std::clamp((1 << 19) / std::max(1, group * c.keys), 1, hands == Hands::own ? 128 : 32);
  const int chunks = (c.tokens + chunk - 1) / chunk;
  // With few tasks (one row decodes), split the query heads of a group too; they read the same keys from cache.
  // Unless these are more than a core's own cache holds beside the rest: then reading them once is worth idle threads.
  const bool near = static_cast<int64_t>(c.keys) * (c.head_dim + c.value_dim) <= 1 << 16;
  const bool split = group > 1 && near && static_cast<int64_t>(c.batch) * c.kv_heads * chunks < 2 * threads;
  const int parts = split ? group : 1, per_part = group / parts;
  const double cost_us = static_cast<double>(c.batch) * c.heads * c.tokens * c.keys * (c.head_dim + c.value_dim) / 2e4;
  const int items = c.batch * c.kv_heads * chunks * parts;
  run_with(hands, items, std::max(1, items / (threads * 8)), cost_us, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int part = i % parts, ch = i / parts % chunks, kv_head = i / (parts * chunks) % c.kv_heads;
      const int b = i / (parts * chunks * c.kv_heads), h0 = kv_head * group + part * per_part;
      const int t0 = ch * chunk, t1 = std::min(c.first == nullptr ? c.tokens : c.count[b], t0 + chunk);
      if (t0 < t1) Task(kernels, c, b, kv_head, t0, t1, h0, h0 + per_part);
    }
  });
}

}  // namespace mantou
