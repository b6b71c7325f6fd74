// Dense block kernels: 16 or 32 output rows times tokens in f32, weights widened on the fly. Included once per
// instruction set, inside its namespace.
//
// K is summed as four quarters, each in order with one accumulator, and then (q0 + q1) + (q2 + q3). One token needs
// the four independent chains to hide the latency of multiply-add; many tokens have chains enough and walk the
// quarters one after the other. Both give the same bits, so a token's result depends neither on the tile nor on its
// place there.
//
// A tile is rows of floats as they are, [token][k_padded]: the kernels read it by broadcasts, a micro-tile of up to
// kDenseWide tokens at once, which is what the registers hold. All micro-tiles of a tile meet one quarter of the weights
// before the next is read, so that the weights come from the second-level cache but once. Up to kDenseFew tokens alone
// in a tile lie side by side instead, [k_padded][tokens]: their four chains each would need as many addresses.

#if defined(__AVX512F__)
constexpr int kDenseWide = 12;        // of 32 rows: 24 accumulators and 12 broadcasts for 24 multiply-adds
constexpr int kDensePair = 2;         // blocks that share the broadcasts
constexpr int kDenseFew = 4;   // tokens up to which the quarters run side by side
#else
constexpr int kDenseWide = 6;
constexpr int kDensePair = 1;
constexpr int kDenseFew = 1;
#endif
constexpr int kDenseTile = 4 * kDenseWide;
static_assert(kDenseTile <= kMaxTile);

static void prepare_dense(const Layout& l, const float* row, int token, int tokens, uint8_t* tile) {
  const size_t few = tokens <= kDenseFew ? tokens : 1;
  auto* x = reinterpret_cast<float*>(tile) + (few > 1 ? token : static_cast<size_t>(token) * l.k_padded);
  if (few == 1) std::memcpy(x, row, static_cast<size_t>(l.k) * sizeof(float));
  for (int k = 0; k < l.k && few > 1; ++k) x[k * few] = row[k];
  for (int k = l.k; k < l.k_padded; ++k) x[k * few] = 0.0f;
}

// Weights of k + ODD for 16 rows, k even, where p points at those of k.
template <Scalar S, int ODD>
MANTOU_INLINE Vf load_weights(const uint8_t* p) {
  if constexpr (S == Scalar::f32) {
    return load(reinterpret_cast<const float*>(p) + 16 * ODD);
  } else if constexpr (S == Scalar::f16) {
    return load_f16(reinterpret_cast<const uint16_t*>(p) + 16 * ODD);
  } else {
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(ODD ? _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                    : _mm512_slli_epi32(both, 16))};
#elif defined(__AVX2__)
    alignas(32) static constexpr uint32_t kHigh[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                      0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    const auto* high = reinterpret_cast<const __m256i*>(kHigh);
    if constexpr (ODD) __asm__ volatile("" : "+r"(high));  // read where it is used: it would displace an accumulator
    const auto widened = [=](const uint8_t* from) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return _mm256_castsi256_ps(ODD ? _mm256_and_si256(both, _mm256_load_si256(high)) : _mm256_slli_epi32(both, 16));
    };
    return {widened(p), widened(p + 32)};
#else
    Vf w;
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t both = vld1q_u32(reinterpret_cast<const uint32_t*>(p) + 4 * i);
      w.q[i] = vreinterpretq_f32_u32(ODD ? vandq_u32(both, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(both, 16));
    }
    return w;
#endif
  }
}

MANTOU_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

// A few tokens: the quarters side by side. x [k_padded][MT], or [MT][k_padded] as Rows.
template <Scalar S, int MT, bool Rows>
static void dense_few(const Layout& l, const uint8_t* p, const float* x, float* out) {
  constexpr size_t row_bytes = 16 * (S == Scalar::f32 ? 4 : 2);
  const int quarter = l.k_padded / 4;
  const size_t m_step = Rows ? l.k_padded : 1, k_step = Rows ? 1 : MT;
  Vf acc[4][MT];
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) acc[c][m] = zero();
  for (int k = 0; k < quarter; k += 2)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const size_t at = static_cast<size_t>(c) * quarter + k;
      const Vf even = load_weights<S, 0>(p + at * row_bytes), odd = load_weights<S, 1>(p + at * row_bytes);
      prefetch(p + at * row_bytes + 1024);
      const float* xk = x + at * k_step;
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) acc[c][m] = fma(even, set1(xk[m * m_step]), acc[c][m]);
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) acc[c][m] = fma(odd, set1(xk[m * m_step + k_step]), acc[c][m]);
    }
#pragma GCC unroll 4
  for (int m = 0; m < MT; ++m) store(out + 16 * m, add(add(acc[0][m], acc[1][m]), add(acc[2][m], acc[3][m])));
}

// P blocks (one, or two that share the broadcasts) and where their results go, [token][16].
template <int P>
struct DenseBlocks {
  const uint8_t* weights[P];
  float* out[P];
};

// The multiply-adds of one k. x[g]: row 3g of the micro-tile at k; one address and one stride reach three rows.
template <Scalar S, int ODD, int MT, int P>
MANTOU_INLINE void dense_outer(const uint8_t* const (&p)[P], const float* const (&x)[(MT + 2) / 3], size_t stride,
                               Vf (&acc)[P][MT]) {
  Vf w[P];
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b) w[b] = load_weights<S, ODD>(p[b]);
#pragma GCC unroll 12
  for (int m = 0; m < MT; ++m) {
    const Vf t = set1(x[m / 3][m % 3 * stride + ODD]);
#pragma GCC unroll 2
    for (int b = 0; b < P; ++b) acc[b][m] = fma(w[b], t, acc[b][m]);
  }
}

// Quarter c of K for a micro-tile of MT rows at x. kept[b]: q0, then q0 + q1, of block b; behind it, kDenseTile * 16
// floats on, q2.
template <Scalar S, int MT, int P>
static void dense_quarter(const DenseBlocks<P>& blocks, int c, int quarter, const float* rows, float* const (&kept)[P],
                          size_t out_at, size_t ahead) {
  constexpr size_t row_bytes = 16 * (S == Scalar::f32 ? 4 : 2);
  const size_t stride = static_cast<size_t>(quarter) * 4;
  Vf acc[P][MT];
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b)
#pragma GCC unroll 12
    for (int m = 0; m < MT; ++m) acc[b][m] = zero();
  const uint8_t* p[P];
  for (int b = 0; b < P; ++b) p[b] = blocks.weights[b] + static_cast<size_t>(c) * quarter * row_bytes;
  const float* x[(MT + 2) / 3];
  for (int g = 0; g < (MT + 2) / 3; ++g) x[g] = rows + 3 * g * stride + static_cast<size_t>(c) * quarter;
  for (int k = 0; k < quarter; k += 2) {
    dense_outer<S, 0>(p, x, stride, acc);
    __asm__ volatile("" ::: "memory");  // no load of the odd weights before: the registers are full
    dense_outer<S, 1>(p, x, stride, acc);
#pragma GCC unroll 2
    for (int b = 0; b < P; ++b) {
      for (size_t at = 0; at < 2 * row_bytes; at += 64) prefetch(p[b] + ahead + at);
      p[b] += 2 * row_bytes;
    }
#pragma GCC unroll 4
    for (int g = 0; g < (MT + 2) / 3; ++g) x[g] += 2;
  }
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b) {
    float *one = kept[b], *two = one + kDenseTile * 16, *out = blocks.out[b] + out_at;
#pragma GCC unroll 12
    for (int m = 0; m < MT; ++m) {
      if (c == 0) store(one + 16 * m, acc[b][m]);
      if (c == 1) store(one + 16 * m, add(load(one + 16 * m), acc[b][m]));
      if (c == 2) store(two + 16 * m, acc[b][m]);
      if (c == 3) store(out + 16 * m, add(load(one + 16 * m), add(load(two + 16 * m), acc[b][m])));
    }
  }
}

// Micro-tiles of MT tokens: as many as there are, or the one of those that are left.
template <Scalar S, int MT, int P>
static void dense_micro_tiles(const DenseBlocks<P>& blocks, int quarter, const float* x, int first, int count) {
  constexpr size_t kAhead = 1024;
  const size_t quarter_bytes = static_cast<size_t>(quarter) * 16 * (S == Scalar::f32 ? 4 : 2);
  alignas(64) float memory[P][2 * kDenseTile * 16];
  for (int c = 0; c < 4; ++c)
    for (int i = 0; i < count; ++i) {
      const int token = first + i * MT;
      float* kept[P];
      for (int b = 0; b < P; ++b) kept[b] = memory[b] + i * MT * 16;
      // The first asks for the weights that come next, of this block or behind the pair, from memory; the others for
      // those that they read themselves, from the second-level cache.
      const size_t ahead = i > 0 ? kAhead : quarter_bytes * (c < 3 ? 1 : 4 * P - 3);
      dense_quarter<S, MT, P>(blocks, c, quarter, x + static_cast<size_t>(token) * quarter * 4, kept, 16 * token, ahead);
    }
}

// The last `left` < kDenseWide tokens.
template <Scalar S, int P, int MT = kDenseWide - 1>
static void dense_rest(const Layout& l, const DenseBlocks<P>& blocks, const float* x, int first, int left) {
  if constexpr (MT > 0) {
    if (left != MT) return dense_rest<S, P, MT - 1>(l, blocks, x, first, left);
    if constexpr (MT > kDenseFew) {
      dense_micro_tiles<S, MT, P>(blocks, l.k_padded / 4, x, first, 1);
    } else {
      for (int b = 0; b < P; ++b) {
        const float* rows = x + static_cast<size_t>(first) * l.k_padded;
        float* out = blocks.out[b] + 16 * first;
        first == 0 ? dense_few<S, MT, false>(l, blocks.weights[b], rows, out)
                   : dense_few<S, MT, true>(l, blocks.weights[b], rows, out);
      }
    }
  }
}

template <Scalar S, int P>
static void dense_blocks_of(const Layout& l, const DenseBlocks<P>& blocks, const float* x, int tokens) {
  const int whole = tokens / kDenseWide;
  if (whole > 0) dense_micro_tiles<S, kDenseWide, P>(blocks, l.k_padded / 4, x, 0, whole);
  dense_rest<S, P>(l, blocks, x, whole * kDenseWide, tokens % kDenseWide);
}

template <int P>
static void dense_blocks(const Layout& l, const DenseBlocks<P>& blocks, const uint8_t* tile, int tokens) {
  const auto* x = reinterpret_cast<const float*>(tile);
  switch (l.scalar) {
    case Scalar::f32: return dense_blocks_of<Scalar::f32, P>(l, blocks, x, tokens);
    case Scalar::bf16: return dense_blocks_of<Scalar::bf16, P>(l, blocks, x, tokens);
    case Scalar::f16: return dense_blocks_of<Scalar::f16, P>(l, blocks, x, tokens);
  }
}
