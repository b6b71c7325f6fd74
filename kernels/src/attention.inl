// Attention of the query rows that share one key-value head. Included once per instruction set.
//
// A query's result depends on the keys that it sees, in their columns, and on nothing else: not on how many queries
// are done together, on how far the key buffer reaches, or on whether a range or a mask hides a key.
//   score      sum over d in 16 lanes, then the tree of simd.h `reduce_add`, in both ways below
//   softmax    max is exact in any order; the sum has one accumulator per column % 16, where a hidden key adds 0
//   weighting  one accumulator per value dimension, in the order of the keys, where a hidden key adds 0 * v

constexpr int kManyQueries = 8;  // from here on a transposed copy of 16 keys pays
#if defined(__AVX512F__)
constexpr int kWide = 4;  // vectors of values that four queries weigh at once: as many sums as there are registers for
#else
constexpr int kWide = 2;
#endif

// Columns [j, the result) lie side by side, from row `row_of(t, j)` on.
MANTOU_INLINE int run_end(const AttendTask& t, int j, int hi) {
  if (t.blocks == nullptr) return hi;
  const int end = ((j >> t.block_shift) + 1) << t.block_shift;
  return end < hi ? end : hi;
}

MANTOU_INLINE int64_t row_of(const AttendTask& t, int j) {
  if (t.blocks == nullptr) return j;
  return (int64_t{t.blocks[j >> t.block_shift]} << t.block_shift) + (j & ((1 << t.block_shift) - 1));
}

// Lane sums of QT queries against 16 keys in kt ([d][16]); lane l sums d = l, l + 16, ...
template <int QT>
MANTOU_INLINE void lane_sum(const float* const* q, const float* kt, int head_dim, int lane, Vf out[QT]) {
#pragma GCC unroll 4
  for (int i = 0; i < QT; ++i) out[i] = zero();
  for (int d = lane; d < head_dim; d += kLanes) {
    const Vf key = load(kt + 16 * d);
#pragma GCC unroll 4
    for (int i = 0; i < QT; ++i) out[i] = fma(set1(q[i][d]), key, out[i]);
  }
}

// The tree of reduce_add, over lanes `lane`, lane + step, ...: a sum of two subtrees of stride 2 * step.
template <int QT, int STEP>
MANTOU_INLINE void tree_sum(const float* const* q, const float* kt, int head_dim, int lane, Vf out[QT]) {
  if constexpr (STEP == kLanes) {
    lane_sum<QT>(q, kt, head_dim, lane, out);
  } else {
    Vf right[QT];
    tree_sum<QT, 2 * STEP>(q, kt, head_dim, lane, out);
    tree_sum<QT, 2 * STEP>(q, kt, head_dim, lane + STEP, right);
#pragma GCC unroll 4
    for (int i = 0; i < QT; ++i) out[i] = add(out[i], right[i]);
  }
}

template <int QT>
static void scores_16(const float* const* q, const float* kt, int head_dim, float* out, size_t out_stride) {
  Vf s[QT];
  tree_sum<QT, 1>(q, kt, head_dim, 0, s);
  for (int i = 0; i < QT; ++i) store(out + i * out_stride, s[i]);
}

MANTOU_INLINE int padded_dim(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

MANTOU_INLINE Vf load_key(const AttendTask& t, int64_t j, int d, int lanes) {
  if (t.key_groups.bits != 0) return load_packed(t.keys, t.key_stride, t.key_groups, t.kv, j, d);
  return load_as_part(t.keys, static_cast<size_t>(j * t.key_stride + d), t.kv, lanes);
}

// Asks for a key that comes soon (row `ahead`, or -1) and for the value that is weighed later (row `at`): a decoding row
// reads each once, from memory.
MANTOU_INLINE void fetch_ahead(const AttendTask& t, int64_t at, int64_t ahead) {
  const auto fetch = [&](const void* rows, int64_t at, int dim) {
    const auto* p = static_cast<const char*>(rows) + at * static_cast<int64_t>(size_of(t.kv));
    for (size_t b = 0; b < static_cast<size_t>(dim) * size_of(t.kv); b += 64) __builtin_prefetch(p + b);
  };
  if (ahead >= 0) fetch(t.keys, ahead * t.key_stride, t.head_dim);
  fetch(t.values, at * t.value_stride, t.value_dim);
}

static void scores_many(const AttendTask& t, int lo, int hi, float* kt, float* scores, size_t stride) {
  const int dim = padded_dim(t.head_dim);
  for (int j0 = lo; j0 < hi; j0 += kLanes) {
    const int keys = hi - j0 < kLanes ? hi - j0 : kLanes;
    const int64_t at = row_of(t, j0);  // blocks hold whole tiles
    if (t.key_groups.bits == 0) {
      const int64_t ahead = j0 + kLanes < hi ? row_of(t, j0 + kLanes) : -1;
      for (int j = 0; j < keys; ++j) fetch_ahead(t, at + j, ahead < 0 || j0 + kLanes + j >= hi ? -1 : ahead + j);
    }
    each_vector(t.head_dim, [&](int d, int lanes) {
      Vf tile[kLanes];
      for (int j = 0; j < keys; ++j) tile[j] = load_key(t, at + j, d, lanes);
      for (int j = keys; j < kLanes; ++j) tile[j] = zero();
      transpose(tile);
      for (int i = 0; i < kLanes; ++i) store(kt + 16 * (d + i), tile[i]);
    });
    float* out = scores + (j0 - lo);
    int i = 0;
    for (; i + 4 <= t.num_queries; i += 4) scores_16<4>(t.queries + i, kt, dim, out + i * stride, stride);
    switch (t.num_queries - i) {
      case 3: scores_16<3>(t.queries + i, kt, dim, out + i * stride, stride); break;
      case 2: scores_16<2>(t.queries + i, kt, dim, out + i * stride, stride); break;
      case 1: scores_16<1>(t.queries + i, kt, dim, out + i * stride, stride); break;
      default: break;
    }
  }
}

// Keys as floats, in rows of `dim`.
static void open_keys(const AttendTask& t, int64_t at, int keys, int dim, float* to) {
  for (int j = 0; j < keys; ++j, ++at, to += dim)
    for (int d = 0; d < dim; d += kLanes) store(to + d, load_key(t, at, d, t.head_dim - d));
}

// Sixteen keys at a time, whose lane sums are added up together.
static void scores_few(const AttendTask& t, int lo, int hi, float* opened, float* scores, size_t stride) {
  const int dim = padded_dim(t.head_dim);
  const bool as_they_lie = t.kv == Scalar::f32 && t.key_groups.bits == 0 && dim == t.head_dim;
  for (int j0 = lo; j0 < hi; j0 += kLanes) {
    const int keys = hi - j0 < kLanes ? hi - j0 : kLanes;
    const int64_t at = row_of(t, j0);  // blocks hold whole tiles
    if (t.key_groups.bits == 0) {
      const int64_t ahead = j0 + kLanes < hi ? row_of(t, j0 + kLanes) : -1;
      for (int j = 0; j < keys; ++j) fetch_ahead(t, at + j, ahead < 0 || j0 + kLanes + j >= hi ? -1 : ahead + j);
    }
    const float* rows = opened;
    int64_t step = dim;
    if (as_they_lie) {
      rows = static_cast<const float*>(t.keys) + at * t.key_stride, step = t.key_stride;
    } else {
      open_keys(t, at, keys, dim, opened);
    }
    for (int i = 0; i < t.num_queries; ++i) {
      const float* q = t.queries[i];
      Vf sums[kLanes];
      if (keys == kLanes) {  // sixteen sums in registers
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) sums[j] = fma(load(q), load(rows + j * step), zero());
        for (int d = kLanes; d < dim; d += kLanes) {
          const Vf part = load(q + d);
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) sums[j] = fma(part, load(rows + j * step + d), sums[j]);
        }
      } else {
        for (int j = 0; j < kLanes; ++j) {
          sums[j] = zero();
          for (int d = 0; j < keys && d < dim; d += kLanes) sums[j] = fma(load(q + d), load(rows + j * step + d), sums[j]);
        }
      }
      store(scores + i * stride + (j0 - lo), reduce_add_each(sums));
    }
  }
}

// Turns the scores of query i into probabilities; hidden keys get exactly 0. `lo` is a multiple of 16.
static void softmax_row(const AttendTask& t, int i, int lo, int hi, float* s) {
  const int n = padded_dim(hi - lo), first = t.first[i] - lo, last = t.last[i] - lo;
  if (t.bias != nullptr && t.bias[i] != nullptr) {
    round_row(s, n, t.round);
    each_vector(last > 0 ? last : 0, [&](int k, int lanes) {
      store_n(s + k, add(load_n(s + k, lanes), load_as_part(t.bias[i], static_cast<size_t>(lo + k), t.bias_scalar, lanes)), lanes);
    });
  }
  round_row(s, n, t.round);
  for (int k = 0; k < first && k < n; ++k) s[k] = -INFINITY;
  for (int k = last > 0 ? last : 0; k < n; ++k) s[k] = -INFINITY;
  if (t.allowed != nullptr && t.allowed[i] != nullptr)
    for (int k = first > 0 ? first : 0; k < last; ++k)
      if (!t.allowed[i][lo + k]) s[k] = -INFINITY;
  Vf top = set1(t.sinks != nullptr ? t.sinks[i] : -INFINITY);
  for (int k = 0; k < n; k += kLanes) top = max(top, load(s + k));
  const float highest = reduce_max(top);
  if (highest == -INFINITY) {  // nothing to see: an unused row; give 0, not NaN
    std::memset(s, 0, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  Vf sum = zero();
  for (int k = 0; k < n; k += kLanes) {
    const Vf e = exp(sub(load(s + k), set1(highest)));
    store(s + k, e);
    sum = add(sum, e);
  }
  float total = reduce_add(sum);
  if (t.sinks != nullptr) total += std::exp(t.sinks[i] - highest);
  const Vf inverse = set1(1.0f / total);
  for (int k = 0; k < n; k += kLanes) store(s + k, rounded(mul(load(s + k), inverse), t.round));
}

// out[q][d .. d + 16 * NV) = sum over keys of p[q][key] * value[key]; the last vector may be partial.
template <int QT, int NV, class Load>
MANTOU_INLINE void weigh_columns(const AttendTask& t, int q0, int lo, int hi, int d0, const float* p, size_t stride, Load&& load_value) {
  Vf acc[QT][NV];
#pragma GCC unroll 4
  for (int i = 0; i < QT; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = zero();
  for (int j = lo; j < hi;) {
    int64_t at = row_of(t, j);
    for (const int end = run_end(t, j, hi); j < end; ++j, ++at) {
      Vf value[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) value[v] = load_value(at, d0 + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < QT; ++i) {
        const Vf w = set1(p[(q0 + i) * stride + (j - lo)]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[i][v] = fma(w, value[v], acc[i][v]);
      }
    }
  }
  for (int i = 0; i < QT; ++i)
    for (int v = 0; v < NV; ++v) {
      const int d = d0 + v * kLanes, n = t.value_dim - d;
      store_n(t.out[q0 + i] + d, acc[i][v], n < kLanes ? n : kLanes);
    }
}

template <int QT, class Load>
static void weigh_by(const AttendTask& t, int q0, int lo, int hi, const float* p, size_t stride, Load&& load_value) {
  constexpr int wide = QT >= 3 ? kWide : 4;
  int d = 0;
  for (; d + wide * kLanes <= t.value_dim; d += wide * kLanes) weigh_columns<QT, wide>(t, q0, lo, hi, d, p, stride, load_value);
  for (; d < t.value_dim; d += kLanes) weigh_columns<QT, 1>(t, q0, lo, hi, d, p, stride, load_value);
}

// A few queries read the values where they lie.
template <int QT>
static void weigh(const AttendTask& t, int q0, int lo, int hi, const float* p, size_t stride) {
  if (t.value_groups.bits != 0) {
    weigh_by<QT>(t, q0, lo, hi, p, stride, [&t](int64_t at, int d) {
      return load_packed(t.values, t.value_stride, t.value_groups, t.kv, at, d);
    });
  } else if (t.kv == Scalar::f32 && t.value_dim % kLanes == 0) {
    weigh_by<QT>(t, q0, lo, hi, p, stride, [values = static_cast<const float*>(t.values), step = t.value_stride](int64_t at, int d) {
      return load(values + at * step + d);
    });
  } else {
    weigh_by<QT>(t, q0, lo, hi, p, stride, [&t](int64_t at, int d) {
      return load_as_part(t.values, static_cast<size_t>(at * t.value_stride + d), t.kv, t.value_dim - d);
    });
  }
}

static void weigh_few(const AttendTask& t, int lo, int hi, const float* p, size_t stride) {
  int i = 0;
  for (; i + 4 <= t.num_queries; i += 4) weigh<4>(t, i, lo, hi, p, stride);
  switch (t.num_queries - i) {
    case 3: weigh<3>(t, i, lo, hi, p, stride); break;
    case 2: weigh<2>(t, i, lo, hi, p, stride); break;
    case 1: weigh<1>(t, i, lo, hi, p, stride); break;
    default: break;
  }
}

// Values [j, hi) as floats, in rows of `dim`.
static void open_values(const AttendTask& t, int j, int hi, int dim, float* to) {
  while (j < hi) {
    int64_t at = row_of(t, j);
    for (const int end = run_end(t, j, hi); j < end; ++j, ++at, to += dim)
      for (int d = 0; d < dim; d += kLanes)
        store(to + d, t.value_groups.bits != 0
                          ? load_packed(t.values, t.value_stride, t.value_groups, t.kv, at, d)
                          : load_as_part(t.values, static_cast<size_t>(at * t.value_stride + d), t.kv, t.value_dim - d));
  }
}

// Goes on with QT queries' sums over `keys` opened values.
template <int QT, int NV>
MANTOU_INLINE void weigh_opened(const float* values, int keys, int dim, const float* p, size_t stride, float* out) {
  Vf acc[QT][NV];
#pragma GCC unroll 4
  for (int i = 0; i < QT; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = load(out + i * dim + v * kLanes);
  for (int j = 0; j < keys; ++j, values += dim) {
    Vf value[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) value[v] = load(values + v * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < QT; ++i) {
      const Vf w = set1(p[i * stride + j]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[i][v] = fma(w, value[v], acc[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < QT; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(out + i * dim + v * kLanes, acc[i][v]);
}

template <int QT>
static void weigh_opened_rows(const float* values, int keys, int dim, const float* p, size_t stride, float* out) {
  int d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) weigh_opened<QT, kWide>(values + d, keys, dim, p, stride, out + d);
  for (; d < dim; d += kLanes) weigh_opened<QT, 1>(values + d, keys, dim, p, stride, out + d);
}

// Many queries take the values in tiles that stay in the first-level cache, each opened once for all of them.
static void weigh_many(const AttendTask& t, int lo, int hi, float* values, float* sums, const float* p, size_t stride) {
  const int dim = padded_dim(t.value_dim);
  std::memset(sums, 0, static_cast<size_t>(t.num_queries) * dim * sizeof(float));
  for (int j = lo; j < hi; j += kKeyTile) {
    const int end = hi - j < kKeyTile ? hi : j + kKeyTile;
    open_values(t, j, end, dim, values);
    for (int i = 0; i < t.num_queries; i += 4) {
      const int n = t.num_queries - i < 4 ? t.num_queries - i : 4;
      int last = 0;  // no query of these sees more: what is behind would add 0
      for (int k = i; k < i + n; ++k) last = t.last[k] > last ? t.last[k] : last;
      const int keys = (last < end ? last : end) - j;
      if (keys <= 0) continue;
      const float* w = p + i * stride + (j - lo);
      float* out = sums + static_cast<size_t>(i) * dim;
      switch (n) {
        case 4: weigh_opened_rows<4>(values, keys, dim, w, stride, out); break;
        case 3: weigh_opened_rows<3>(values, keys, dim, w, stride, out); break;
        case 2: weigh_opened_rows<2>(values, keys, dim, w, stride, out); break;
        default: weigh_opened_rows<1>(values, keys, dim, w, stride, out); break;
      }
    }
  }
  for (int i = 0; i < t.num_queries; ++i)
    std::memcpy(t.out[i], sums + static_cast<size_t>(i) * dim, static_cast<size_t>(t.value_dim) * sizeof(float));
}

static void attend(const AttendTask& t) {
  int lo = 1 << 30, hi = 0;
  for (int i = 0; i < t.num_queries; ++i) {
    lo = t.first[i] < lo ? t.first[i] : lo;
    hi = t.last[i] > hi ? t.last[i] : hi;
  }
  lo = lo < hi ? lo / kLanes * kLanes : 0;  // columns keep their accumulator (column % 16) whatever the window
  const size_t stride = static_cast<size_t>(padded_dim(hi - lo));
  float* kt = t.scratch;
  float* scores = t.scratch + static_cast<size_t>(padded_dim(t.head_dim)) * kLanes;
  if (t.num_queries >= kManyQueries) {
    scores_many(t, lo, hi, kt, scores, stride);
  } else {
    scores_few(t, lo, hi, kt, scores, stride);
  }
  for (int i = 0; i < t.num_queries; ++i) softmax_row(t, i, lo, hi, scores + i * stride);
  if (t.num_queries >= kManyQueries) {
    float* values = scores + t.num_queries * stride;
    weigh_many(t, lo, hi, values, values + kKeyTile * static_cast<size_t>(padded_dim(t.value_dim)), scores, stride);
  } else {
    weigh_few(t, lo, hi, scores, stride);
  }
}
