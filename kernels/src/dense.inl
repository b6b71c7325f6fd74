// Dense block kernels: 16 or 32 output rows times tokens in f32, weights widened on the fly. Included once per
// instruction set, inside its namespace.
//
// K is summed as four quarters, each in order with one accumulator, and then (q0 + q1) + (q2 + q3). One token needs
// the four independent chains to hide the latency of multiply-add; many tokens have chains enough and walk the
// quarters one after the other. Both give the same bits, so a token's result depends neither on the tile nor on its
// place there.
//
// A tile is cut into micro-tiles of up to kDenseWide tokens, [k_padded][width] floats each, one behind the other: what
// the registers hold at once. All micro-tiles of a tile meet one quarter of the weights before the next is read, so that
// the weights come from the first-level cache but once.

#if defined(__AVX512F__)
constexpr int kDenseWide = 12;        // of 32 rows: 24 accumulators and 12 broadcasts for 24 multiply-adds
constexpr int kDensePair = 2;         // blocks that share the broadcasts
constexpr int kDenseInterleave = 4;   // tokens up to which the quarters run side by side
#else
constexpr int kDenseWide = 6;
constexpr int kDensePair = 1;
constexpr int kDenseInterleave = 1;
#endif
constexpr int kDenseTile = 4 * kDenseWide;
static_assert(kDenseTile <= kMaxTile);

// Width of the micro-tile that begins where `left` tokens are left: sometimes more than there are.
static int dense_width(int left) {
#if defined(__AVX512F__)
  return left > 8 ? 12 : left > 4 ? 8 : left;
#else
  return left > 4 ? 6 : left;
#endif
}

static void prepare_dense(const Layout& l, const float* row, int token, int tokens, uint8_t* tile) {
  const int first = token / kDenseWide * kDenseWide, width = dense_width(tokens - first);
  auto* x = reinterpret_cast<float*>(tile) + static_cast<size_t>(first) * l.k_padded + (token - first);
  for (int k = 0; k < l.k; ++k) x[static_cast<size_t>(k) * width] = row[k];
  for (int k = l.k; k < l.k_padded; ++k) x[static_cast<size_t>(k) * width] = 0.0f;
  if (token + 1 < tokens) return;
  for (int spare = 1; spare < width - (token - first); ++spare)  // no arithmetic on what memory held
    for (int k = 0; k < l.k_padded; ++k) x[static_cast<size_t>(k) * width + spare] = 0.0f;
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

// A few tokens: the quarters side by side. x [k_padded][MT].
template <Scalar S, int MT>
static void dense_few(const Layout& l, const uint8_t* p, const float* x, float* out) {
  constexpr size_t row_bytes = 16 * (S == Scalar::f32 ? 4 : 2);
  const int quarter = l.k_padded / 4;
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
      const float* xk = x + at * MT;
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) acc[c][m] = fma(even, set1(xk[m]), acc[c][m]);
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) acc[c][m] = fma(odd, set1(xk[MT + m]), acc[c][m]);
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

// The multiply-adds of one k.
template <Scalar S, int ODD, int MT, int P>
MANTOU_INLINE void dense_outer(const uint8_t* const (&p)[P], const float* x, Vf (&acc)[P][MT]) {
  Vf w[P];
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b) w[b] = load_weights<S, ODD>(p[b]);
#pragma GCC unroll 12
  for (int m = 0; m < MT; ++m) {
    const Vf t = set1(x[m]);
#pragma GCC unroll 2
    for (int b = 0; b < P; ++b) acc[b][m] = fma(w[b], t, acc[b][m]);
  }
}

// Quarter c of K for a micro-tile. kept[b]: q0, then q0 + q1, of block b; behind it, kDenseTile * 16 floats on, q2.
template <Scalar S, int MT, int P>
static void dense_quarter(const DenseBlocks<P>& blocks, int c, int quarter, int first, const float* x,
                          float (*kept)[2 * kDenseTile * 16]) {
  constexpr size_t row_bytes = 16 * (S == Scalar::f32 ? 4 : 2);
  Vf acc[P][MT];
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b)
#pragma GCC unroll 12
    for (int m = 0; m < MT; ++m) acc[b][m] = zero();
  const uint8_t* p[P];
  for (int b = 0; b < P; ++b) p[b] = blocks.weights[b] + static_cast<size_t>(c) * quarter * row_bytes;
  x += static_cast<size_t>(c) * quarter * MT;
  for (int k = 0; k < quarter; k += 2, x += 2 * MT) {
    dense_outer<S, 0>(p, x, acc);
    __asm__ volatile("" ::: "memory");  // no load of the odd weights before: the registers are full
    dense_outer<S, 1>(p, x + MT, acc);
    for (int b = 0; b < P; ++b) p[b] += 2 * row_bytes;
  }
#pragma GCC unroll 2
  for (int b = 0; b < P; ++b) {
    float *one = kept[b] + 16 * first, *two = one + kDenseTile * 16, *out = blocks.out[b] + 16 * first;
#pragma GCC unroll 12
    for (int m = 0; m < MT; ++m) {
      if (c == 0) store(one + 16 * m, acc[b][m]);
      if (c == 1) store(one + 16 * m, add(load(one + 16 * m), acc[b][m]));
      if (c == 2) store(two + 16 * m, acc[b][m]);
      if (c == 3) store(out + 16 * m, add(load(one + 16 * m), add(load(two + 16 * m), acc[b][m])));
    }
  }
}

template <Scalar S, int P>
static void dense_width_quarter(int width, const DenseBlocks<P>& blocks, int c, int quarter, int first, const float* x,
                                float (*kept)[2 * kDenseTile * 16]) {
  switch (width) {
#if defined(__AVX512F__)
    case 12: return dense_quarter<S, 12, P>(blocks, c, quarter, first, x, kept);
    default: return dense_quarter<S, 8, P>(blocks, c, quarter, first, x, kept);
#else
    case 6: return dense_quarter<S, 6, P>(blocks, c, quarter, first, x, kept);
    case 4: return dense_quarter<S, 4, P>(blocks, c, quarter, first, x, kept);
    case 3: return dense_quarter<S, 3, P>(blocks, c, quarter, first, x, kept);
    default: return dense_quarter<S, 2, P>(blocks, c, quarter, first, x, kept);
#endif
  }
}

template <Scalar S>
static void dense_last(int width, const Layout& l, const uint8_t* p, const float* x, float* out) {
  switch (width) {
#if defined(__AVX512F__)
    case 4: return dense_few<S, 4>(l, p, x, out);
    case 3: return dense_few<S, 3>(l, p, x, out);
    case 2: return dense_few<S, 2>(l, p, x, out);
#endif
    default: return dense_few<S, 1>(l, p, x, out);
  }
}

template <Scalar S, int P>
static void dense_blocks_of(const Layout& l, const DenseBlocks<P>& blocks, const float* x, int tokens) {
  alignas(64) float kept[P][2 * kDenseTile * 16];
  const int quarter = l.k_padded / 4, few = dense_width(tokens % kDenseWide) <= kDenseInterleave ? tokens % kDenseWide : 0;
  const int many = tokens - few;
  for (int c = 0; c < 4 && many > 0; ++c)
    for (int first = 0; first < many; first += kDenseWide)
      dense_width_quarter<S, P>(dense_width(tokens - first), blocks, c, quarter, first,
                                x + static_cast<size_t>(first) * l.k_padded, kept);
  for (int b = 0; b < P && few > 0; ++b)
    dense_last<S>(few, l, blocks.weights[b], x + static_cast<size_t>(many) * l.k_padded, blocks.out[b] + 16 * many);
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
