// How a matrix product is cut into tiles, blocks and chunks.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "scratch.h"

namespace mantou {
namespace {

// Rows prepared at once: as many as stay in a second-level cache, since each block walks over all of them.
constexpr int kPanelRows = 512, kLeastPanelRows = 128;
constexpr size_t kPanelBytes = size_t{1} << 20;

int panel_rows(const Layout& l) {
  const auto fitting = static_cast<int>(kPanelBytes / tile_bytes(l, 1));
  return std::clamp(fitting / kAffineTile * kAffineTile, kLeastPanelRows, kPanelRows);
}

// Rows order[first, first + count) form one tile of one expert.
struct Tile {
  int first, count;
};
// The tiles [begin, end) all multiply the same expert.
struct Group {
  int expert, begin, end;
};

struct Plan {
  std::vector<int32_t> order;  // output rows, grouped by expert
  std::vector<Tile> tiles;
  std::vector<Group> groups;
};

// How rows become tiles: of at most `tile` rows, cut at multiples of `unit`.
struct Cut {
  int tile, unit;
};

// Splits `count` rows into tiles of nearly equal size, so that no tile is left with one row. Those of one size follow each
// other: a kernel may have to prepare itself for a size.
void add_tiles(Plan& plan, Cut cut, int first, int count) {
  const int tiles = (count + cut.tile - 1) / cut.tile, units = (count + cut.unit - 1) / cut.unit;
  for (int t = 0, begin = 0; t < tiles; ++t) {
    const int end = std::min(count, begin + (units / tiles + (t < units % tiles)) * cut.unit);
    plan.tiles.push_back({first + begin, end - begin});
    begin = end;
  }
}

void make_plan(const LinearCall& c, Cut cut, int first_row, int num_rows, Plan& plan) {
  plan.order.resize(num_rows);
  plan.tiles.clear();
  plan.groups.clear();
  std::iota(plan.order.begin(), plan.order.end(), first_row);
  if (c.expert == nullptr) {
    add_tiles(plan, cut, 0, num_rows);
    plan.groups.push_back({0, 0, static_cast<int>(plan.tiles.size())});
    return;
  }
  std::stable_sort(plan.order.begin(), plan.order.end(), [&](int a, int b) { return c.expert[a] < c.expert[b]; });
  for (int i = 0, j; i < num_rows; i = j) {
    const int expert = c.expert[plan.order[i]], begin = static_cast<int>(plan.tiles.size());
    for (j = i; j < num_rows && c.expert[plan.order[j]] == expert; ++j) {}
    add_tiles(plan, cut, i, j - i);
    plan.groups.push_back({expert, begin, static_cast<int>(plan.tiles.size())});
  }
}

// The quantised blocks that a thread multiplies by several tiles. It has room for two that follow each other, a gate and
// its up.
class Opened {
 public:
  Opened(const Kernels& kernels, const Packed& weights) : kernels_(kernels), weights_(weights) {}
  Opened(const Opened&) = delete;
  ~Opened() { kernels_.rest(); }

  // The block as multiply_opened wants it for tiles of `tokens` rows, or null where that is no quicker.
  const uint8_t* get(const uint8_t* packed, int index, int tokens) {
    const size_t bytes = kernels_.opened_bytes(weights_.layout, tokens);
    if (bytes == 0) return nullptr;
    static thread_local Scratch scratch;
    uint8_t* to = scratch.take(2 * bytes) + (index % 2) * bytes;
    if (from_[index % 2] != packed) kernels_.open(weights_.layout, packed, to);
    from_[index % 2] = packed;
    return to;
  }

 private:
  const Kernels& kernels_;
  const Packed& weights_;
  const uint8_t* from_[2] = {nullptr, nullptr};
};

// One panel of rows: the plan and the prepared activations.
class Panel {
 public:
  Panel(const Kernels& kernels, const LinearCall& call, int first_row, int num_rows, Hands hands = Hands::pool)
      : kernels_(kernels), call_(call), layout_(call.weights->layout) {
    const bool dense = layout_.form == Form::dense;
    const Cut cut = dense ? Cut{kernels.dense_tile, kernels.dense_width} : Cut{kAffineTile, 1};
    make_plan(call, cut, first_row, num_rows, plan_);
    const bool as_given = call.x_type == Scalar::f32 && call.norm == nullptr && call.expert == nullptr &&
                          call.source == nullptr && layout_.k == layout_.k_padded;
    if (dense && as_given && num_rows > kernels.dense_few) {
      rows_ = static_cast<const float*>(call.x);
      return;
    }
    int most = 0;
    for (const Tile& t : plan_.tiles) most = std::max(most, t.count);
    tile_bytes_ = (tile_bytes(layout_, most) + 63) / 64 * 64;
    static thread_local Scratch scratch;  // the calling thread's; helpers only read it while it waits for them
    tiles_ = scratch.take(tile_bytes_ * plan_.tiles.size());
    std::vector<std::pair<int, int>> places;  // (tile, row of it)
    for (size_t t = 0; t < plan_.tiles.size(); ++t)
      for (int i = 0; i < plan_.tiles[t].count; ++i) places.push_back({static_cast<int>(t), i});
    run_with(hands, static_cast<int>(places.size()), 2, 0.0006 * num_rows * layout_.k, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) prepare(places[i].first, places[i].second);
    });
  }

  const Plan& plan() const { return plan_; }

  // out[i][token][16]: `count` (1 or 2) blocks from `index` on of the group's expert, times tile `t`.
  void multiply(Opened& opened, const Group& group, int index, int count, int t, float* const* out) const {
    const int tokens = plan_.tiles[t].count;
    const bool several = layout_.form == Form::affine && group.end - group.begin > 1;
    const uint8_t* blocks[2];
    for (int i = 0; i < count; ++i) blocks[i] = call_.weights->block(group.expert, index + i);
    if (!several || opened.get(blocks[0], index, tokens) == nullptr)
      return kernels_.multiply(layout_, blocks, count, tile(t), tokens, call_.planes, out);
    for (int i = 0; i < count; ++i)
      kernels_.multiply_opened(layout_, opened.get(blocks[i], index + i, tokens), tile(t), tokens, call_.planes, out[i]);
  }

  double cost_us() const {  // 16 bytes or 60 products a nanosecond and thread, roughly
    double bytes = 0, products = 0;
    for (const Group& g : plan_.groups) bytes += static_cast<double>(layout_.block_bytes) * layout_.blocks * (g.expert >= 0);
    products = static_cast<double>(plan_.order.size()) * layout_.rows * layout_.k;
    return std::max(bytes / 16e3, products / 60e3);
  }

 private:
  const uint8_t* tile(int t) const {
    if (rows_ == nullptr) return tiles_ + tile_bytes_ * t;
    const auto first = static_cast<size_t>(plan_.order[plan_.tiles[t].first]);
    return reinterpret_cast<const uint8_t*>(rows_ + first * layout_.k);
  }

  void prepare(int index, int row_of_tile) const {
    static thread_local Scratch scratch;
    const Tile& t = plan_.tiles[index];
    const int k = layout_.k;
    const int32_t target = plan_.order[t.first + row_of_tile];
    const size_t source = call_.source != nullptr ? call_.source[target] : target;
    const float* values;
    if (call_.x_type == Scalar::f32 && call_.norm == nullptr) {
      values = static_cast<const float*>(call_.x) + source * k;
    } else {
      float* row = scratch.floats(k);
      values = row;
      kernels_.load(call_.x, source * k, call_.x_type, k, row);
      if (call_.norm != nullptr) kernels_.rms_norm(row, call_.norm, call_.norm_eps, k, call_.x_type, row);
    }
    kernels_.prepare(layout_, values, row_of_tile, t.count, call_.planes, tiles_ + tile_bytes_ * index);
  }

  const Kernels& kernels_;
  const LinearCall& call_;
  const Layout& layout_;
  Plan plan_;
  const float* rows_ = nullptr;  // where the call's rows are tiles as they are
  size_t tile_bytes_ = 0;
  uint8_t* tiles_ = nullptr;
};

// Bias of a block, or null.
const float* bias_of(const LinearCall& c, int expert, int block) {
  if (c.bias == nullptr) return nullptr;
  return c.bias + static_cast<size_t>(expert) * c.weights->layout.rows + static_cast<size_t>(block) * kBlockRows;
}

void add_bias(const Kernels& k, const LinearCall& c, int expert, int block, int tokens, float* out) {
  k.round(out, tokens * kBlockRows, c.out_type);
  const float* bias = bias_of(c, expert, block);
  if (bias == nullptr) return;
  const int n = std::min(kBlockRows, c.weights->layout.rows - block * kBlockRows);
  for (int m = 0; m < tokens; ++m) k.add(out + m * kBlockRows, bias, n);
  k.round(out, tokens * kBlockRows, c.out_type);
}

// Columns of 16 outputs [begin, end) of one expert, for all its tiles. A column is a block, or a gate-up pair of blocks.
class Columns {
 public:
  Columns(const Kernels& kernels, const LinearCall& call, const Panel& panel, const Group& group)
      : k_(kernels), c_(call), panel_(panel), group_(group),
        opened_(kernels, *call.weights),
        width_(call.gated ? call.weights->layout.rows / 2 : call.weights->layout.rows) {}

  void run(int begin, int end) {
    const Layout& l = c_.weights->layout;
    const bool dense = l.form == Form::dense;
    // Dense weights come once from memory for all tiles, and a tile once for all these columns.
    const size_t column_bytes = l.block_bytes * (c_.gated ? 2 : 1);
    const int together = dense ? std::max(2, static_cast<int>(kCachedBytes / column_bytes)) : 1;
    for (int from = begin; from < end; from += together) {
      const int to = std::min(end, from + together);
      for (int t = group_.begin; t < group_.end; ++t)
        for (int column = from; column < to; column += 2)
          if (c_.gated || !dense || column + 1 == to) {
            for (int i = column; i < std::min(to, column + 2); ++i) one(i, t);
          } else {
            two(column, t);
          }
    }
  }

 private:
  static constexpr size_t kCachedBytes = size_t{192} << 10;  // of weights that stay in a second-level cache

  void one(int column, int t) {
    const int tokens = panel_.plan().tiles[t].count;
    float* out[2] = {out_, second_};
    if (!c_.gated) {
      panel_.multiply(opened_, group_, column, 1, t, out);
      return finish(out_, column, t, bias_of(c_, group_.expert, column));
    }
    panel_.multiply(opened_, group_, 2 * column, 2, t, out);
    add_bias(k_, c_, group_.expert, 2 * column, tokens, out_);
    add_bias(k_, c_, group_.expert, 2 * column + 1, tokens, second_);
    k_.gate(c_.gate, out_, second_, tokens * kBlockRows, c_.out_type, out_);
    finish(out_, column, t, nullptr);
  }

  void two(int column, int t) {
    float* out[2] = {out_, second_};
    panel_.multiply(opened_, group_, column, 2, t, out);
    for (int i = 0; i < 2; ++i) finish(out[i], column + i, t, bias_of(c_, group_.expert, column + i));
  }

  void finish(const float* values, int column, int t, const float* bias) {
    const Tile& tile = panel_.plan().tiles[t];
    size_t at[kMaxTile];
    for (int m = 0; m < tile.count; ++m)
      at[m] = static_cast<size_t>(panel_.plan().order[tile.first + m]) * width_ + column * kBlockRows;
    const int n = std::min(kBlockRows, width_ - column * kBlockRows);
    k_.finish(values, tile.count, n, {c_.out_type, bias, c_.activated, c_.gate, c_.residual}, at, c_.out);
  }

  const Kernels& k_;
  const LinearCall& c_;
  const Panel& panel_;
  const Group& group_;
  Opened opened_;
  const int width_;
  alignas(64) float out_[kMaxTile * kBlockRows], second_[kMaxTile * kBlockRows];
};

int chunk_for(int items) { return std::max(1, items / (Pool::instance().threads() * 6)); }

struct Candidate {
  float value;
  int32_t index;
  bool operator<(const Candidate& o) const { return value > o.value || (value == o.value && index < o.index); }
};

// Keeps the best `count`, sorted.
void offer(std::vector<Candidate>& best, int count, Candidate c) {
  if (!(c.value == c.value)) c.value = -INFINITY;  // not a number never wins
  if (static_cast<int>(best.size()) == count && !(c < best.back())) return;
  best.insert(std::upper_bound(best.begin(), best.end(), c), c);
  if (static_cast<int>(best.size()) > count) best.pop_back();
}

// Keeps the best, from blocks in rising order: an equal one stays with the lower index. Not-a-number is never higher.
void offer_block(const Kernels& k, Candidate& best, const float* x, int block, int n) {
  if (k.draw.highest(x, n) <= best.value) return;
  for (int r = 0; r < n; ++r)
    if (x[r] > best.value) best = {x[r], block * kBlockRows + r};
}

// Which outputs of each row may win.
class Choice {
 public:
  Choice(const uint8_t* bits, int outputs) : bits_(bits), num_bytes_((static_cast<size_t>(outputs) + 7) / 8) {}

  // Whether one of `count` rows may have one of the `n` outputs of a block.
  bool any(int row, int count, int block, int n) const {
    if (bits_ == nullptr) return true;
    for (int m = 0; m < count; ++m)
      for (int i = 0; i < (n + 7) / 8; ++i)
        if (at(row + m, block)[i] != 0) return true;
    return false;
  }

  void restrict(const Kernels& k, int row, int block, float* x, int n) const {
    if (bits_ != nullptr) k.draw.restrict(x, at(row, block), n, x);
  }

 private:
  static_assert(kBlockRows % 8 == 0);
  const uint8_t* at(int row, int block) const { return bits_ + row * num_bytes_ + block * (kBlockRows / 8); }

  const uint8_t* bits_;
  size_t num_bytes_;
};

}  // namespace

void linear(const Kernels& kernels, const LinearCall& call, Hands hands) {
  const int step = call.expert != nullptr ? std::max(1, call.num_rows) : panel_rows(call.weights->layout);
  const int columns = call.weights->layout.blocks / (call.gated ? 2 : 1);
  for (int first = 0; first < call.num_rows; first += step) {
    Panel panel(kernels, call, first, std::min(step, call.num_rows - first), hands);
    const int items = static_cast<int>(panel.plan().groups.size()) * columns;
    run_with(hands, items, chunk_for(items), panel.cost_us(), [&](int begin, int end) {
      for (int i = begin, next; i < end; i = next) {
        next = std::min(end, (i / columns + 1) * columns);
        const int first = i % columns;
        Columns(kernels, call, panel, panel.plan().groups[i / columns]).run(first, first + next - i);
      }
    });
  }
}

void linear_top(const Kernels& kernels, const LinearCall& call, int count, float* values, int32_t* indices) {
  const Layout& l = call.weights->layout;
  std::vector<std::vector<Candidate>> best(call.num_rows);
  std::mutex mutex;
  for (int first = 0; first < call.num_rows; first += kPanelRows) {
    Panel panel(kernels, call, first, std::min(kPanelRows, call.num_rows - first));
    const Group& group = panel.plan().groups[0];
    Pool::instance().run(l.blocks, chunk_for(l.blocks), panel.cost_us(), [&](int begin, int end) {
      std::vector<std::vector<Candidate>> mine(panel.plan().order.size());
      alignas(64) float out[kMaxTile * kBlockRows];
      float* const to[1] = {out};
      Opened opened(kernels, *call.weights);
      for (int b = begin; b < end; ++b)
        for (int t = group.begin; t < group.end; ++t) {
          const Tile& tile = panel.plan().tiles[t];
          panel.multiply(opened, group, b, 1, t, to);
          kernels.round(out, tile.count * kBlockRows, call.out_type);
          const int n = std::min(kBlockRows, l.rows - b * kBlockRows);
          for (int m = 0; m < tile.count; ++m)
            for (int r = 0; r < n; ++r)
              offer(mine[tile.first + m], count, {out[m * kBlockRows + r], b * kBlockRows + r});
        }
      std::lock_guard<std::mutex> lock(mutex);  // the order of merging does not matter: (value, index) is total
      for (size_t i = 0; i < mine.size(); ++i)
        for (const Candidate& c : mine[i]) offer(best[first + i], count, c);
    });
  }
  for (int i = 0; i < call.num_rows; ++i)
    for (int j = 0; j < count; ++j) {
      values[static_cast<size_t>(i) * count + j] = best[i][j].value;
      indices[static_cast<size_t>(i) * count + j] = best[i][j].index;
    }
}

void linear_highest(const Kernels& kernels, const LinearCall& call, const uint8_t* allowed, float* values,
                    int32_t* indices) {
  const Layout& l = call.weights->layout;
  const Choice choice(allowed, l.rows);
  std::mutex mutex;
  for (int first = 0; first < call.num_rows; first += kPanelRows) {
    Panel panel(kernels, call, first, std::min(kPanelRows, call.num_rows - first));
    const Group& group = panel.plan().groups[0];
    std::vector<Candidate> best(panel.plan().order.size(), {-INFINITY, INT32_MAX}), initial(best);
    Pool::instance().run(l.blocks, chunk_for(l.blocks), panel.cost_us(), [&](int begin, int end) {
      std::vector<Candidate> mine(best.size(), {-INFINITY, INT32_MAX});
      alignas(64) float out[kMaxTile * kBlockRows];
      float* const to[1] = {out};
      Opened opened(kernels, *call.weights);
      for (int b = begin; b < end; ++b)
        for (int t = group.begin; t < group.end; ++t) {
          const Tile& tile = panel.plan().tiles[t];
          const int row = first + tile.first, n = std::min(kBlockRows, l.rows - b * kBlockRows);
          if (b > 0 && !choice.any(row, tile.count, b, n)) continue;
          panel.multiply(opened, group, b, 1, t, to);
          kernels.round(out, tile.count * kBlockRows, call.out_type);
          for (int m = 0; b == 0 && m < tile.count; ++m) initial[tile.first + m] = {out[m * kBlockRows], 0};
          for (int m = 0; m < tile.count; ++m) {
            choice.restrict(kernels, row + m, b, out + m * kBlockRows, n);
            offer_block(kernels, mine[tile.first + m], out + m * kBlockRows, b, n);
          }
        }
      std::lock_guard<std::mutex> lock(mutex);
      for (size_t i = 0; i < mine.size(); ++i) best[i] = std::min(best[i], mine[i]);
    });
    for (size_t i = 0; i < best.size(); ++i) {
      const Candidate& found = best[i].index == INT32_MAX ? initial[i] : best[i];
      values[first + i] = found.value;
      indices[first + i] = found.index;
    }
  }
}

}  // namespace mantou
