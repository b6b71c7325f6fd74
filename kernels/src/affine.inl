// Quantised block kernels: 16 output rows times up to 16 tokens. Included once per instruction set, inside its
// namespace.
//
// Activations of a token are quantised alone, per unit of 32 values: x ~ scale * i, |i| <= 32512 for two int8 planes
// (i = 256 * high + low) or |i| <= 127 for one. Products are exact in int32 (32 * 255 * 32512 < 2^31), and units are
// summed in the order of k with one accumulator a row, so a token's result is the same in every tile size.
// The bias term uses scale * sum(i), the sum of what was multiplied: the error is then w * (x - x~), not q * (x - x~).
//
// Tile: unit-major, [unit][token][64 bytes], then [unit][token]{scale, sum} as floats.
//   AVX-512, AVX-VNNI, NEON  32 high bytes, 32 low bytes (one plane: the first 32)
//   AVX2                     the same for weights of up to 6 bits, whose products two by two fit 16 bits; for 8 bits
//                            32 int16, each four as k0 k2 k1 k3, for multiplying even and odd bytes apart

struct UnitScale {
  float scale, sum;
};

MANTOU_INLINE UnitScale* tile_scales(const Layout& l, int tokens, uint8_t* tile) {
  return reinterpret_cast<UnitScale*>(tile + static_cast<size_t>(l.k / kUnit) * tokens * 64);
}

MANTOU_INLINE Vf load_scales(const uint8_t* p, Scalar s) {
  if (s == Scalar::f32) return load(reinterpret_cast<const float*>(p));
  const auto* h = reinterpret_cast<const uint16_t*>(p);
  return s == Scalar::bf16 ? load_bf16(h) : load_f16(h);
}

MANTOU_INLINE Vf load_biases(const Layout& l, const uint8_t* p, Vf scales) {
  if (l.centred) return mul(scales, set1(-static_cast<float>(1 << (l.bits - 1))));
  return load_scales(p, l.scalar);
}

// The 32 integers of one unit, and its scale and sum. Not-a-number and infinity must not turn into plausible
// integers: they make the whole unit not-a-number.
[[maybe_unused]] MANTOU_INLINE UnitScale quantise_unit(const float* x, int planes, int32_t* out) {
  Vf a = load(x), b = load(x + 16);
  const float largest = reduce_max(max(abs(a), abs(b)));
  if (any_nan(a) || any_nan(b) || largest > 3.4028234e38f) {
    std::memset(out, 0, 32 * sizeof(int32_t));
    return {NAN, NAN};
  }
  const float limit = planes == 1 ? 127.0f : 32512.0f;
  // Below 1e-30 the inverse would overflow; such a unit is zero for every purpose.
  const float inverse = largest > 1e-30f ? limit / largest : 0.0f;
  alignas(64) float rounded[32];
  store(rounded, round_even(mul(a, set1(inverse))));
  store(rounded + 16, round_even(mul(b, set1(inverse))));
  int sum = 0;
  for (int i = 0; i < 32; ++i) {
    out[i] = static_cast<int32_t>(rounded[i]);
    sum += out[i];
  }
  const float scale = largest / limit;
  return {scale, scale * static_cast<float>(sum)};
}

#if defined(__AVX512F__)

// Quantises one unit straight into its tile bytes: what quantise_unit and the loop below give, in vectors.
MANTOU_INLINE UnitScale prepare_unit(const float* x, int planes, uint8_t* out) {
  const Vf a = load(x), b = load(x + 16);
  const float largest = reduce_max(max(abs(a), abs(b)));
  if (any_nan(a) || any_nan(b) || largest > 3.4028234e38f) {
    _mm512_storeu_si512(out, _mm512_setzero_si512());
    return {NAN, NAN};
  }
  const float limit = planes == 1 ? 127.0f : 32512.0f;
  const Vf inverse = set1(largest > 1e-30f ? limit / largest : 0.0f);
  const __m512i qa = _mm512_cvtps_epi32(mul(a, inverse).v), qb = _mm512_cvtps_epi32(mul(b, inverse).v);
  const auto keep = [&](int at, __m512i q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at), _mm512_cvtepi32_epi8(q));
  };
  if (planes == 1) {
    keep(0, qa), keep(16, qb);
  } else {
    const __m512i half = _mm512_set1_epi32(128);
    keep(0, _mm512_srai_epi32(_mm512_add_epi32(qa, half), 8));
    keep(16, _mm512_srai_epi32(_mm512_add_epi32(qb, half), 8));
    keep(32, qa), keep(48, qb);  // the low byte as it is: q - 256 * high, modulo 256
  }
  const float scale = largest / limit;
  return {scale, scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb)))};
}

static void prepare_affine(const Layout& l, const float* row, int token, int tokens, int planes, uint8_t* tile) {
  UnitScale* scales = tile_scales(l, tokens, tile);
  for (int u = 0; u < l.k / kUnit; ++u) {
    const size_t at = static_cast<size_t>(u) * tokens + token;
    scales[at] = prepare_unit(row + u * kUnit, planes, tile + at * 64);
  }
}

#elif defined(__AVX2__)

// Whether activations are bytes, or 16-bit words: without VNNI an int16 must hold the sum of two products.
MANTOU_INLINE bool as_bytes([[maybe_unused]] int bits) {
#if defined(__AVXVNNI__) || defined(MANTOU_AMX_EMULATED)
  return true;
#else
  return bits <= 6;
#endif
}

// The same in vectors of eight.
MANTOU_INLINE UnitScale prepare_unit(const float* x, int planes, bool bytes, uint8_t* out) {
  const Vf a = load(x), b = load(x + 16);
  const float largest = reduce_max(max(abs(a), abs(b)));
  const auto keep = [out](int at, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), v); };
  if (any_nan(a) || any_nan(b) || largest > 3.4028234e38f) {
    keep(0, _mm256_setzero_si256()), keep(32, _mm256_setzero_si256());
    return {NAN, NAN};
  }
  const float limit = planes == 1 ? 127.0f : 32512.0f;
  const Vf inverse = set1(largest > 1e-30f ? limit / largest : 0.0f), sa = mul(a, inverse), sb = mul(b, inverse);
  const __m256i q[4] = {_mm256_cvtps_epi32(sa.lo), _mm256_cvtps_epi32(sa.hi), _mm256_cvtps_epi32(sb.lo), _mm256_cvtps_epi32(sb.hi)};
  const auto words = [](__m256i lo, __m256i hi) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8); };
  const __m256i first = words(q[0], q[1]), second = words(q[2], q[3]);
  if (!bytes) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    keep(0, _mm256_shuffle_epi8(first, order)), keep(32, _mm256_shuffle_epi8(second, order));
  } else if (planes == 1) {
    keep(0, _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8));
  } else {
    // high = (q + 128) >> 8, of at most 127, and low = q - 256 * high, which is the low byte as it is.
    const __m256i half = _mm256_set1_epi16(128), low = _mm256_set1_epi16(255);
    const __m256i h0 = _mm256_srai_epi16(_mm256_add_epi16(first, half), 8), h1 = _mm256_srai_epi16(_mm256_add_epi16(second, half), 8);
    keep(0, _mm256_permute4x64_epi64(_mm256_packs_epi16(h0, h1), 0xd8));
    keep(32, _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(first, low), _mm256_and_si256(second, low)), 0xd8));
  }
  const __m256i sums = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  const float scale = largest / limit;
  return {scale, scale * static_cast<float>(_mm_cvtsi128_si32(s))};
}

static void prepare_affine(const Layout& l, const float* row, int token, int tokens, int planes, uint8_t* tile) {
  UnitScale* scales = tile_scales(l, tokens, tile);
  const bool bytes = as_bytes(l.bits);
  for (int u = 0; u < l.k / kUnit; ++u) {
    const size_t at = static_cast<size_t>(u) * tokens + token;
    scales[at] = prepare_unit(row + u * kUnit, planes, bytes, tile + at * 64);
  }
}

#else

static void prepare_affine(const Layout& l, const float* row, int token, int tokens, int planes, uint8_t* tile) {
  UnitScale* scales = tile_scales(l, tokens, tile);
  alignas(64) int32_t q[32];
  for (int u = 0; u < l.k / kUnit; ++u) {
    scales[static_cast<size_t>(u) * tokens + token] = quantise_unit(row + u * kUnit, planes, q);
    auto* bytes = reinterpret_cast<int8_t*>(tile + (static_cast<size_t>(u) * tokens + token) * 64);
    for (int i = 0; i < 32; ++i) {
      const int high = planes == 1 ? q[i] : (q[i] + 128) >> 8;
      bytes[i] = static_cast<int8_t>(high);
      if (planes == 2) bytes[32 + i] = static_cast<int8_t>(q[i] - high * 256);
    }
  }
}

#endif

#if defined(__AVX512F__)

constexpr int kTileSteps[] = {16, 12, 8, 7, 6, 5, 4, 3, 2, 1};

// Asks for a line twice: as far ahead as memory takes, for the second-level cache, and near, for the first.
MANTOU_INLINE void fetch_ahead(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p) + 1024, _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(p) + kFetchedAhead, _MM_HINT_T1);
}

// Eight vectors of 64 bytes: value 4*i+j of row r at byte 4*r+j of v[i] (packed.h).
template <int BITS>
MANTOU_INLINE void load_unit(const uint8_t* p, __m512i v[8]) {
  const auto at = [&](int offset) {
    fetch_ahead(p + offset);
    return _mm512_loadu_si512(p + offset);
  };
  const __m512i low4 = _mm512_set1_epi8(15), low2 = _mm512_set1_epi8(3), low1 = _mm512_set1_epi8(1);
  if constexpr (BITS >= 4 && BITS <= 6) {
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const __m512i two = at(64 * t);
      v[2 * t] = _mm512_and_si512(two, low4);
      v[2 * t + 1] = _mm512_and_si512(_mm512_srli_epi16(two, 4), low4);
    }
  }
  if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
    constexpr int start = BITS == 6 ? 256 : 0;
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
      const __m512i four = at(start + 64 * t);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i pair = _mm512_and_si512(_mm512_srli_epi16(four, 2 * i), low2);
        v[4 * t + i] = BITS == 6 ? _mm512_or_si512(v[4 * t + i], _mm512_slli_epi16(pair, 4)) : pair;
      }
    }
  }
  if constexpr (BITS == 3 || BITS == 5) {
    const __m512i all = at(BITS == 3 ? 128 : 256);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512i bit = _mm512_and_si512(_mm512_srli_epi16(all, i), low1);
      v[i] = _mm512_or_si512(v[i], _mm512_slli_epi16(bit, BITS == 3 ? 2 : 4));
    }
  }
  if constexpr (BITS == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = at(64 * i);
  }
}

template <int BITS, int MT, int PLANES>
static void affine_tile(const Layout& l, const uint8_t* p, const uint8_t* x, const UnitScale* xs, int tokens, float* out) {
  constexpr int kSide = MT <= 8 ? MT : MT / 2;
  static_assert(MT % kSide == 0 && kSide <= 8);
  const int units = l.k / kUnit, units_per_group = l.group / kUnit;
  const size_t scale_bytes = 16 * size_of(l.scalar);
  __m512 acc[MT];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) acc[m] = _mm512_setzero_ps();
  for (int u = 0; u < units;) {
    const uint8_t* sp = p + static_cast<size_t>(64) * BITS * units_per_group;
    fetch_ahead(sp);
    const Vf scales = load_scales(sp, l.scalar);
    const __m512 scale = scales.v, bias = load_biases(l, sp + scale_bytes, scales).v;
    for (int j = 0; j < units_per_group; ++j, ++u, p += 64 * BITS, x += static_cast<size_t>(64) * tokens, xs += tokens) {
      __m512i v[8];
      load_unit<BITS>(p, v);
      // Up to eight tokens side by side: their sums are the independent chains that hide the latency of vpdpbusd, and a
      // vector of weights is needed for all of them at once.
#pragma GCC unroll 16
      for (int m0 = 0; m0 < MT; m0 += kSide) {
        __m512i high[kSide], low[kSide];
#pragma GCC unroll 8
        for (int c = 0; c < kSide; ++c) high[c] = low[c] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 8
          for (int c = 0; c < kSide; ++c) {
            const auto* xi = reinterpret_cast<const int32_t*>(x + 64 * (m0 + c));
            high[c] = _mm512_dpbusd_epi32(high[c], v[i], _mm512_set1_epi32(xi[i]));
            if constexpr (PLANES == 2) low[c] = _mm512_dpbusd_epi32(low[c], v[i], _mm512_set1_epi32(xi[8 + i]));
          }
        }
#pragma GCC unroll 8
        for (int c = 0; c < kSide; ++c) {
          if constexpr (PLANES == 2) high[c] = _mm512_add_epi32(_mm512_slli_epi32(high[c], 8), low[c]);
          const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(high[c]), scale);
          acc[m0 + c] = _mm512_fmadd_ps(dot, _mm512_set1_ps(xs[m0 + c].scale), acc[m0 + c]);
          acc[m0 + c] = _mm512_fmadd_ps(bias, _mm512_set1_ps(xs[m0 + c].sum), acc[m0 + c]);
        }
      }
    }
    p += l.centred ? scale_bytes : 2 * scale_bytes;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) _mm512_storeu_ps(out + 16 * m, acc[m]);
}

#elif defined(__AVX2__)

constexpr int kTileSteps[] = {8, 6, 4, 3, 2, 1};

// 32 bytes (8 rows) of the byte vector i of a unit.
template <int BITS>
MANTOU_INLINE __m256i load_half(const uint8_t* p, int i, int half) {
  const auto at = [&](int vector) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * vector + 32 * half));
  };
  const auto bits = [&](__m256i v, int shift, int mask) {
    return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(static_cast<char>(mask)));
  };
  if constexpr (BITS == 8) return at(i);
  if constexpr (BITS == 2) return bits(at(i / 4), i % 4 * 2, 3);
  if constexpr (BITS == 3)
    return _mm256_or_si256(bits(at(i / 4), i % 4 * 2, 3), _mm256_slli_epi16(bits(at(2), i, 1), 2));
  const __m256i nibble = bits(at(i / 2), i % 2 * 4, 15);
  if constexpr (BITS == 4) return nibble;
  if constexpr (BITS == 5) return _mm256_or_si256(nibble, _mm256_slli_epi16(bits(at(4), i, 1), 4));
  return _mm256_or_si256(nibble, _mm256_slli_epi16(bits(at(4 + i / 4), i % 4 * 2, 3), 4));
}

// Integer sums of half a unit's rows for MT tokens.
template <int BITS, int MT, int PLANES>
MANTOU_INLINE void sum_half(const uint8_t* p, const uint8_t* x, int half, __m256i sum[MT]) {
#if defined(__AVXVNNI__)
  if constexpr (PLANES == 2 && MT > 4) {  // two sums a token: more than four tokens do not fit the registers
    sum_half<BITS, 4, PLANES>(p, x, half, sum);
    return sum_half<BITS, MT - 4, PLANES>(p, x + 4 * 64, half, sum + 4);
  }
  __m256i low[MT];
#pragma GCC unroll 8
  for (int m = 0; m < MT; ++m) sum[m] = low[m] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256i v = load_half<BITS>(p, i, half);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) {
      const auto* xi = reinterpret_cast<const int32_t*>(x + 64 * m) + i;
      sum[m] = _mm256_dpbusd_avx_epi32(sum[m], v, _mm256_set1_epi32(xi[0]));
      if constexpr (PLANES == 2) low[m] = _mm256_dpbusd_avx_epi32(low[m], v, _mm256_set1_epi32(xi[8]));
    }
  }
  if constexpr (PLANES == 2)
    for (int m = 0; m < MT; ++m) sum[m] = _mm256_add_epi32(_mm256_slli_epi32(sum[m], 8), low[m]);
#else
  if constexpr (BITS <= 6 && PLANES == 2 && MT > 4) {  // two sums a token, as above
    sum_half<BITS, 4, PLANES>(p, x, half, sum);
    return sum_half<BITS, MT - 4, PLANES>(p, x + 4 * 64, half, sum + 4);
  }
  if constexpr (BITS <= 6) {
    // Two products of a weight and a byte are at most 256 * (2^bits - 1): so many of them fit 16 bits.
    constexpr int kTogether = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[PLANES][MT], sums[PLANES][MT];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m256i v = load_half<BITS>(p, i, half);
#pragma GCC unroll 8
      for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 2
        for (int plane = 0; plane < PLANES; ++plane) {
          const int32_t four = reinterpret_cast<const int32_t*>(x + 64 * m + 32 * plane)[i];
          const __m256i two = _mm256_maddubs_epi16(v, _mm256_set1_epi32(four));
          pairs[plane][m] = i % kTogether == 0 ? two : _mm256_add_epi16(pairs[plane][m], two);
          if (i % kTogether != kTogether - 1) continue;
          const __m256i wide = _mm256_madd_epi16(pairs[plane][m], ones);
          sums[plane][m] = i < kTogether ? wide : _mm256_add_epi32(sums[plane][m], wide);
        }
      }
    }
    for (int m = 0; m < MT; ++m)
      sum[m] = PLANES == 1 ? sums[0][m] : _mm256_add_epi32(_mm256_slli_epi32(sums[0][m], 8), sums[PLANES - 1][m]);
    return;
  }
  const __m256i even_bytes = _mm256_set1_epi16(255);
#pragma GCC unroll 8
  for (int m = 0; m < MT; ++m) sum[m] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256i v = load_half<BITS>(p, i, half);
    const __m256i even = _mm256_and_si256(v, even_bytes), odd = _mm256_srli_epi16(v, 8);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) {
      const auto* xi = reinterpret_cast<const int32_t*>(x + 64 * m) + 2 * i;
      const __m256i a = _mm256_madd_epi16(even, _mm256_set1_epi32(xi[0]));
      sum[m] = _mm256_add_epi32(sum[m], _mm256_add_epi32(a, _mm256_madd_epi16(odd, _mm256_set1_epi32(xi[1]))));
    }
  }
#endif
}

template <int BITS, int MT, int PLANES>
static void affine_tile(const Layout& l, const uint8_t* p, const uint8_t* x, const UnitScale* xs, int tokens, float* out) {
  const int units = l.k / kUnit, units_per_group = l.group / kUnit;
  const size_t scale_bytes = 16 * size_of(l.scalar);
  __m256 acc[2][MT];
  for (int m = 0; m < MT; ++m) acc[0][m] = acc[1][m] = _mm256_setzero_ps();
  for (int u = 0; u < units;) {
    const uint8_t* sp = p + static_cast<size_t>(64) * BITS * units_per_group;
    const Vf scale = load_scales(sp, l.scalar), bias = load_biases(l, sp + scale_bytes, scale);
    for (int j = 0; j < units_per_group; ++j, ++u, p += 64 * BITS, x += static_cast<size_t>(64) * tokens, xs += tokens) {
      for (int half = 0; half < 2; ++half) {
        const __m256 s = half ? scale.hi : scale.lo, b = half ? bias.hi : bias.lo;
        __m256i sum[MT];
        sum_half<BITS, MT, PLANES>(p, x, half, sum);
        for (int m = 0; m < MT; ++m) {
          const __m256 dot = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[m]), s);
          acc[half][m] = _mm256_fmadd_ps(dot, _mm256_set1_ps(xs[m].scale), acc[half][m]);
          acc[half][m] = _mm256_fmadd_ps(b, _mm256_set1_ps(xs[m].sum), acc[half][m]);
        }
      }
    }
    p += l.centred ? scale_bytes : 2 * scale_bytes;
  }
  for (int m = 0; m < MT; ++m) store(out + 16 * m, {acc[0][m], acc[1][m]});
}

#else  // NEON with dot products

constexpr int kTileSteps[] = {8, 6, 4, 3, 2, 1};

// 16 bytes (4 rows) of the byte vector i of a unit. sdot is signed: up to 6 bits fit; 8-bit values lose 128 here and
// get it back from the sum of the activations (affine_tile).
template <int BITS>
MANTOU_INLINE int8x16_t load_quarter(const uint8_t* p, int i, int quarter) {
  const auto at = [&](int vector) { return vld1q_u8(p + 64 * vector + 16 * quarter); };
  const auto bits = [&](uint8x16_t v, int shift, int mask) {
    return vandq_u8(vshlq_u8(v, vdupq_n_s8(static_cast<int8_t>(-shift))), vdupq_n_u8(static_cast<uint8_t>(mask)));
  };
  uint8x16_t v;
  if constexpr (BITS == 8) {
    v = veorq_u8(at(i), vdupq_n_u8(0x80));
  } else if constexpr (BITS == 2) {
    v = bits(at(i / 4), i % 4 * 2, 3);
  } else if constexpr (BITS == 3) {
    v = vorrq_u8(bits(at(i / 4), i % 4 * 2, 3), vshlq_n_u8(bits(at(2), i, 1), 2));
  } else {
    v = bits(at(i / 2), i % 2 * 4, 15);
    if constexpr (BITS == 5) v = vorrq_u8(v, vshlq_n_u8(bits(at(4), i, 1), 4));
    if constexpr (BITS == 6) v = vorrq_u8(v, vshlq_n_u8(bits(at(4 + i / 4), i % 4 * 2, 3), 4));
  }
  return vreinterpretq_s8_u8(v);
}

MANTOU_INLINE int32_t sum_bytes(const int8_t* p) {  // of 32
  return vaddlvq_s8(vld1q_s8(p)) + vaddlvq_s8(vld1q_s8(p + 16));
}

template <int BITS, int MT, int PLANES>
static void affine_tile(const Layout& l, const uint8_t* p, const uint8_t* x, const UnitScale* xs, int tokens, float* out) {
  const int units = l.k / kUnit, units_per_group = l.group / kUnit;
  const size_t scale_bytes = 16 * size_of(l.scalar);
  float32x4_t acc[4][MT];
  for (int q = 0; q < 4; ++q)
    for (int m = 0; m < MT; ++m) acc[q][m] = vdupq_n_f32(0.0f);
  for (int u = 0; u < units;) {
    const uint8_t* sp = p + static_cast<size_t>(64) * BITS * units_per_group;
    const Vf scale = load_scales(sp, l.scalar), bias = load_biases(l, sp + scale_bytes, scale);
    for (int j = 0; j < units_per_group; ++j, ++u, p += 64 * BITS, x += static_cast<size_t>(64) * tokens, xs += tokens) {
      for (int q = 0; q < 4; ++q) {
        int8x16_t v[8];
        for (int i = 0; i < 8; ++i) v[i] = load_quarter<BITS>(p, i, q);
        for (int m = 0; m < MT; ++m) {
          const auto* xi = reinterpret_cast<const int8_t*>(x + 64 * m);
          int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(0);
          for (int i = 0; i < 8; ++i) {
            int32_t word;
            std::memcpy(&word, xi + 4 * i, 4);
            high = vdotq_s32(high, v[i], vreinterpretq_s8_s32(vdupq_n_s32(word)));
            if constexpr (PLANES == 2) {
              std::memcpy(&word, xi + 32 + 4 * i, 4);
              low = vdotq_s32(low, v[i], vreinterpretq_s8_s32(vdupq_n_s32(word)));
            }
          }
          if constexpr (PLANES == 2) high = vaddq_s32(vshlq_n_s32(high, 8), low);
          if constexpr (BITS == 8) {
            int32_t sum = sum_bytes(xi);
            if constexpr (PLANES == 2) sum = sum * 256 + sum_bytes(xi + 32);
            high = vaddq_s32(high, vdupq_n_s32(128 * sum));
          }
          const float32x4_t dot = vmulq_f32(vcvtq_f32_s32(high), scale.q[q]);
          acc[q][m] = vfmaq_n_f32(acc[q][m], dot, xs[m].scale);
          acc[q][m] = vfmaq_n_f32(acc[q][m], bias.q[q], xs[m].sum);
        }
      }
    }
    p += l.centred ? scale_bytes : 2 * scale_bytes;
  }
  for (int m = 0; m < MT; ++m)
    for (int q = 0; q < 4; ++q) vst1q_f32(out + 16 * m + 4 * q, acc[q][m]);
}

#endif

using AffineTile = void (*)(const Layout&, const uint8_t*, const uint8_t*, const UnitScale*, int, float*);

template <int BITS, int PLANES>
static AffineTile affine_tile_for(int step) {
  switch (step) {
#if defined(__AVX512F__)
    case 16: return affine_tile<BITS, 16, PLANES>;
    case 12: return affine_tile<BITS, 12, PLANES>;
    case 7: return affine_tile<BITS, 7, PLANES>;
    case 5: return affine_tile<BITS, 5, PLANES>;
#endif
    case 8: return affine_tile<BITS, 8, PLANES>;
    case 6: return affine_tile<BITS, 6, PLANES>;
    case 4: return affine_tile<BITS, 4, PLANES>;
    case 3: return affine_tile<BITS, 3, PLANES>;
    case 2: return affine_tile<BITS, 2, PLANES>;
    default: return affine_tile<BITS, 1, PLANES>;
  }
}

template <int BITS>
static void affine_block(const Layout& l, const uint8_t* block, const uint8_t* tile, int tokens, int planes, float* out) {
  const UnitScale* scales = tile_scales(l, tokens, const_cast<uint8_t*>(tile));
  int done = 0;
  for (int step : kTileSteps)
    for (; tokens - done >= step; done += step) {
      AffineTile f = planes == 1 ? affine_tile_for<BITS, 1>(step) : affine_tile_for<BITS, 2>(step);
      f(l, block, tile + 64 * done, scales + done, tokens, out + 16 * done);
    }
}
