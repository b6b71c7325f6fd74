// Dense block kernels: 16 output rows times up to 16 tokens in f32, weights widened on the fly. Included once per
// instruction set, inside its namespace.
//
// K is summed as four quarters, each in order with one accumulator, and then (q0 + q1) + (q2 + q3). One token needs
// the four independent chains to hide the latency of multiply-add; many tokens have chains enough and walk the
// quarters one after the other. Both give the same bits, so a token's result does not depend on the tile.
//
// Tile: [k_padded][tokens] floats.

static void prepare_dense(const Layout& l, const float* row, int token, int tokens, uint8_t* tile) {
  auto* x = reinterpret_cast<float*>(tile) + token;
  for (int k = 0; k < l.k; ++k) x[static_cast<size_t>(k) * tokens] = row[k];
  for (int k = l.k; k < l.k_padded; ++k) x[static_cast<size_t>(k) * tokens] = 0.0f;
}

#if defined(__AVX512F__)
constexpr int kDenseInterleave = 4;  // tokens up to which the quarters run side by side
#else
constexpr int kDenseInterleave = 1;
#endif

// How many tokens to do in one pass over the weights when `left` are left: sometimes more than there are. What the pass
// then reads lies in the tile or in the room behind it, which is that of kMaxTile tokens, as is the room for results.
static int dense_step_for(int left) {
#if defined(__AVX512F__)
  return left > 12 ? 16 : left > 8 ? 12 : left > 4 ? 8 : left;
#else
  return left > 4 ? 6 : left;
#endif
}

// Weights of two consecutive k for 16 rows.
template <Scalar S>
MANTOU_INLINE void load_two(const uint8_t* p, Vf& even, Vf& odd) {
  if constexpr (S == Scalar::f32) {
    const auto* f = reinterpret_cast<const float*>(p);
    even = load(f), odd = load(f + 16);
  } else if constexpr (S == Scalar::f16) {
    const auto* h = reinterpret_cast<const uint16_t*>(p);
    even = load_f16(h), odd = load_f16(h + 16);
  } else {
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(p);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
#else
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t both = vld1q_u32(reinterpret_cast<const uint32_t*>(p) + 4 * i);
      even.q[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      odd.q[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
    }
#endif
  }
}

MANTOU_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

template <Scalar S, int MT>
static void dense_tile(const Layout& l, const uint8_t* p, const float* x, int tokens, float* out) {
  constexpr size_t row_bytes = 16 * (S == Scalar::f32 ? 4 : 2);
  const int quarter = l.k_padded / 4;
  if constexpr (MT <= kDenseInterleave) {
    Vf acc[4][MT];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
      for (int m = 0; m < MT; ++m) acc[c][m] = zero();
    for (int k = 0; k < quarter; k += 2)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        Vf even, odd;
        const size_t at = static_cast<size_t>(c) * quarter + k;
        load_two<S>(p + at * row_bytes, even, odd);
        prefetch(p + at * row_bytes + 1024);
        const float* xk = x + at * tokens;
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) acc[c][m] = fma(even, set1(xk[m]), acc[c][m]);
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) acc[c][m] = fma(odd, set1(xk[tokens + m]), acc[c][m]);
      }
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) store(out + 16 * m, add(add(acc[0][m], acc[1][m]), add(acc[2][m], acc[3][m])));
  } else {
    alignas(64) float kept[2][MT * 16];  // q0, then q0 + q1; and q2
    for (int c = 0; c < 4; ++c) {
      Vf acc[MT];
#pragma GCC unroll 16
      for (int m = 0; m < MT; ++m) acc[m] = zero();
      for (int k = 0; k < quarter; k += 2) {
        Vf even, odd;
        const size_t at = static_cast<size_t>(c) * quarter + k;
        load_two<S>(p + at * row_bytes, even, odd);
        const float *xk = x + at * tokens, *next = xk + tokens;
        __asm__("" : "+r"(next));  // one address with offsets; the compiler would keep MT addresses, and spill them
#pragma GCC unroll 16
        for (int m = 0; m < MT; ++m) acc[m] = fma(even, set1(xk[m]), acc[m]);
#pragma GCC unroll 16
        for (int m = 0; m < MT; ++m) acc[m] = fma(odd, set1(next[m]), acc[m]);
      }
      for (int m = 0; m < MT; ++m) {
        float* first = kept[0] + 16 * m;
        float* second = kept[1] + 16 * m;
        if (c == 0) store(first, acc[m]);
        if (c == 1) store(first, add(load(first), acc[m]));
        if (c == 2) store(second, acc[m]);
        if (c == 3) store(out + 16 * m, add(load(first), add(load(second), acc[m])));
      }
    }
  }
}

template <Scalar S>
static void dense_step(int step, const Layout& l, const uint8_t* p, const float* x, int tokens, float* out) {
  switch (step) {
#if defined(__AVX512F__)
    case 16: return dense_tile<S, 16>(l, p, x, tokens, out);
    case 12: return dense_tile<S, 12>(l, p, x, tokens, out);
    case 8: return dense_tile<S, 8>(l, p, x, tokens, out);
#endif
    case 6: return dense_tile<S, 6>(l, p, x, tokens, out);
    case 4: return dense_tile<S, 4>(l, p, x, tokens, out);
    case 3: return dense_tile<S, 3>(l, p, x, tokens, out);
    case 2: return dense_tile<S, 2>(l, p, x, tokens, out);
    default: return dense_tile<S, 1>(l, p, x, tokens, out);
  }
}

static void dense_block(const Layout& l, const uint8_t* block, const uint8_t* tile, int tokens, float* out) {
  const auto* x = reinterpret_cast<const float*>(tile);
  for (int done = 0, step; done < tokens; done += step) {
    step = dense_step_for(tokens - done);
    float* to = out + 16 * done;
    switch (l.scalar) {
      case Scalar::f32: dense_step<Scalar::f32>(step, l, block, x + done, tokens, to); break;
      case Scalar::bf16: dense_step<Scalar::bf16>(step, l, block, x + done, tokens, to); break;
      case Scalar::f16: dense_step<Scalar::f16>(step, l, block, x + done, tokens, to); break;
    }
  }
}
