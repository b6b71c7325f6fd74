// Sixteen float lanes over AVX-512, AVX2 or NEON. The only file that names float intrinsics; it knows no matrix.
//
// A file that includes this defines MANTOU_ISA: everything lives in namespace mantou::MANTOU_ISA, so that the same
// source compiles once per instruction set without symbols colliding. Multiply-adds are explicit (`fma`), and the
// build forbids the compiler to make others (-ffp-contract=off): a template instance for 1 row and one for 16 rows
// must round alike, because a row's result may not depend on its neighbours.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "simd.h needs AVX-512, AVX2 or NEON"
#endif

#define MANTOU_INLINE static inline __attribute__((always_inline))

namespace mantou::MANTOU_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)  // ------------------------------------------------------------------------ AVX-512

struct Vf {
  __m512 v;
};
MANTOU_INLINE Vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
MANTOU_INLINE void store(float* p, Vf a) { _mm512_storeu_ps(p, a.v); }
MANTOU_INLINE Vf set1(float x) { return {_mm512_set1_ps(x)}; }
MANTOU_INLINE Vf add(Vf a, Vf b) { return {_mm512_add_ps(a.v, b.v)}; }
MANTOU_INLINE Vf sub(Vf a, Vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
MANTOU_INLINE Vf mul(Vf a, Vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
MANTOU_INLINE Vf div(Vf a, Vf b) { return {_mm512_div_ps(a.v, b.v)}; }
MANTOU_INLINE Vf fma(Vf a, Vf b, Vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// x86 returns the second operand when either is NaN, so `b` is the one whose NaN survives.
MANTOU_INLINE Vf max(Vf a, Vf b) { return {_mm512_max_ps(a.v, b.v)}; }
MANTOU_INLINE Vf min(Vf a, Vf b) { return {_mm512_min_ps(a.v, b.v)}; }
MANTOU_INLINE Vf abs(Vf a) { return {_mm512_abs_ps(a.v)}; }
MANTOU_INLINE Vf round_even(Vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
MANTOU_INLINE Vf pow2(Vf n) { return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), n.v)}; }
MANTOU_INLINE Vf zero_where_below(Vf a, Vf x, float bound) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_LT_OQ), _mm512_setzero_ps())};
}
MANTOU_INLINE bool any_nan(Vf a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
MANTOU_INLINE Vf load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
MANTOU_INLINE Vf load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
MANTOU_INLINE Vf widen_u8(__m128i b) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b))}; }
MANTOU_INLINE Vf round_bf16(Vf a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
  r = _mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000)))};
}
MANTOU_INLINE void store_bf16(uint16_t* p, Vf a) {
  __m512i u = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(a).v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(u));
}
MANTOU_INLINE void store_f16(uint16_t* p, Vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
MANTOU_INLINE Vf round_f16(Vf a) { return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT))}; }
// Adds lane l to l+8, then l+4, l+2, l+1. Attention relies on exactly this tree (attention.inl, `scores_many`).
MANTOU_INLINE float reduce_add(Vf a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
MANTOU_INLINE float reduce_max(Vf a) { return _mm512_reduce_max_ps(a.v); }

#elif defined(__AVX2__)  // --------------------------------------------------------------------------- AVX2

struct Vf {
  __m256 lo, hi;
};
MANTOU_INLINE Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MANTOU_INLINE void store(float* p, Vf a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
MANTOU_INLINE Vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MANTOU_INLINE Vf add(Vf a, Vf b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf sub(Vf a, Vf b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf mul(Vf a, Vf b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf div(Vf a, Vf b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf fma(Vf a, Vf b, Vf c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
MANTOU_INLINE Vf max(Vf a, Vf b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf min(Vf a, Vf b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
MANTOU_INLINE Vf abs(Vf a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
MANTOU_INLINE Vf round_even(Vf a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
MANTOU_INLINE __m256 pow2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
MANTOU_INLINE Vf pow2(Vf n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
MANTOU_INLINE Vf zero_where_below(Vf a, Vf x, float bound) {
  const __m256 b = _mm256_set1_ps(bound);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, b, _CMP_LT_OQ), a.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, b, _CMP_LT_OQ), a.hi)};
}
MANTOU_INLINE bool any_nan(Vf a) {
  return (_mm256_movemask_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)) |
          _mm256_movemask_ps(_mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) != 0;
}
MANTOU_INLINE __m256 widen_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
MANTOU_INLINE Vf load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
MANTOU_INLINE Vf widen_u8(__m128i b) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
MANTOU_INLINE Vf load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
MANTOU_INLINE __m256 round_bf16_half(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
  __m256 kept = _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(kept, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
MANTOU_INLINE Vf round_bf16(Vf a) { return {round_bf16_half(a.lo), round_bf16_half(a.hi)}; }
MANTOU_INLINE void store_bf16(uint16_t* p, Vf a) {
  Vf r = round_bf16(a);
  __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(r.lo), 16), hi = _mm256_srli_epi32(_mm256_castps_si256(r.hi), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
MANTOU_INLINE void store_f16(uint16_t* p, Vf a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
MANTOU_INLINE Vf round_f16(Vf a) {
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT)),
          _mm256_cvtph_ps(_mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT))};
}
MANTOU_INLINE float reduce_add(Vf a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
MANTOU_INLINE float reduce_max(Vf a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

#else  // -------------------------------------------------------------------------------------------- NEON

struct Vf {
  float32x4_t q[4];
};
#define MANTOU_EACH(expr) \
  Vf r;                   \
  for (int i = 0; i < 4; ++i) r.q[i] = (expr); \
  return r
MANTOU_INLINE Vf load(const float* p) { MANTOU_EACH(vld1q_f32(p + 4 * i)); }
MANTOU_INLINE void store(float* p, Vf a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.q[i]);
}
MANTOU_INLINE Vf set1(float x) { MANTOU_EACH(vdupq_n_f32(x)); }
MANTOU_INLINE Vf add(Vf a, Vf b) { MANTOU_EACH(vaddq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf sub(Vf a, Vf b) { MANTOU_EACH(vsubq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf mul(Vf a, Vf b) { MANTOU_EACH(vmulq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf div(Vf a, Vf b) { MANTOU_EACH(vdivq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf fma(Vf a, Vf b, Vf c) { MANTOU_EACH(vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
MANTOU_INLINE Vf max(Vf a, Vf b) { MANTOU_EACH(vmaxq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf min(Vf a, Vf b) { MANTOU_EACH(vminq_f32(a.q[i], b.q[i])); }
MANTOU_INLINE Vf abs(Vf a) { MANTOU_EACH(vabsq_f32(a.q[i])); }
MANTOU_INLINE Vf round_even(Vf a) { MANTOU_EACH(vrndnq_f32(a.q[i])); }
MANTOU_INLINE Vf pow2(Vf n) {
  MANTOU_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.q[i]), vdupq_n_s32(127)), 23)));
}
MANTOU_INLINE Vf zero_where_below(Vf a, Vf x, float bound) {
  MANTOU_EACH(vbslq_f32(vcltq_f32(x.q[i], vdupq_n_f32(bound)), vdupq_n_f32(0.0f), a.q[i]));
}
MANTOU_INLINE bool any_nan(Vf a) {
  uint32x4_t ok = vdupq_n_u32(~0u);
  for (int i = 0; i < 4; ++i) ok = vandq_u32(ok, vceqq_f32(a.q[i], a.q[i]));
  return vminvq_u32(ok) == 0;
}
MANTOU_INLINE Vf load_bf16(const uint16_t* p) {
  MANTOU_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
MANTOU_INLINE Vf widen_u8(uint8x16_t b) {
  const uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
MANTOU_INLINE Vf load_f16(const uint16_t* p) {
  MANTOU_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
MANTOU_INLINE float32x4_t round_bf16_quarter(float32x4_t a) {
  uint32x4_t u = vreinterpretq_u32_f32(a);
  uint32x4_t even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  uint32x4_t r = vandq_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), even), vdupq_n_u32(0xffff0000u));
  return vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(a, a), r, vdupq_n_u32(0x7fc00000)));
}
MANTOU_INLINE Vf round_bf16(Vf a) { MANTOU_EACH(round_bf16_quarter(a.q[i])); }
MANTOU_INLINE void store_bf16(uint16_t* p, Vf a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(round_bf16_quarter(a.q[i])), 16));
}
MANTOU_INLINE void store_f16(uint16_t* p, Vf a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i])));
}
MANTOU_INLINE Vf round_f16(Vf a) { MANTOU_EACH(vcvt_f32_f16(vcvt_f16_f32(a.q[i]))); }
MANTOU_INLINE float reduce_add(Vf a) {
  float32x4_t q = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
MANTOU_INLINE float reduce_max(Vf a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[2]), vmaxq_f32(a.q[1], a.q[3])));
}
#undef MANTOU_EACH

#endif  // ------------------------------------------------------------------------------ common to all of them

// Lane l of row i becomes lane i of row l. Moves bits only.
#if defined(__AVX512F__)
MANTOU_INLINE void transpose(Vf (&r)[kLanes]) {
  __m512 a[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  // b[4 * i + l], quarter c: lane 4 * c + l of rows 4 * i .. 4 * i + 3
  __m512 b[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 4) {
    const auto pair = [](__m512 x, __m512 y, bool high) {
      const __m512d l = _mm512_castps_pd(x), h = _mm512_castps_pd(y);
      return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(l, h) : _mm512_unpacklo_pd(l, h));
    };
    b[i] = pair(a[i], a[i + 2], false), b[i + 1] = pair(a[i], a[i + 2], true);
    b[i + 2] = pair(a[i + 1], a[i + 3], false), b[i + 3] = pair(a[i + 1], a[i + 3], true);
  }
#pragma GCC unroll 4
  for (int l = 0; l < 4; ++l) {
    const __m512 even_low = _mm512_shuffle_f32x4(b[l], b[4 + l], 0x88), odd_low = _mm512_shuffle_f32x4(b[l], b[4 + l], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(b[8 + l], b[12 + l], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[8 + l], b[12 + l], 0xdd);
    r[l].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    r[4 + l].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    r[8 + l].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    r[12 + l].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}
#else
MANTOU_INLINE void transpose(Vf (&r)[kLanes]) {
  alignas(64) float rows[kLanes][kLanes], columns[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(rows[i], r[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int l = 0; l < kLanes; ++l) columns[l][i] = rows[i][l];
  for (int l = 0; l < kLanes; ++l) r[l] = load(columns[l]);
}
#endif

// Lane i is reduce_add(r[i]), by the same tree.
#if defined(__AVX512F__)
MANTOU_INLINE Vf reduce_add_each(const Vf (&r)[kLanes]) {
  // Vector 4 * i + c goes to place i + 4 * c, which is what the last two steps undo.
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int p = 0; p < 8; ++p) {
    const __m512 a = r[2 * p % 4 * 4 + p / 2].v, b = r[(2 * p + 1) % 4 * 4 + p / 2].v;
    eight[p] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p)
    four[p] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[2 * p], eight[2 * p + 1], 0x88),
                            _mm512_shuffle_f32x4(eight[2 * p], eight[2 * p + 1], 0xdd));
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    const __m512d a = _mm512_castps_pd(four[2 * p]), b = _mm512_castps_pd(four[2 * p + 1]);
    two[p] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd))};
}
#else
MANTOU_INLINE Vf reduce_add_each(const Vf (&r)[kLanes]) {
  alignas(64) float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = reduce_add(r[i]);
  return load(sums);
}
#endif

MANTOU_INLINE Vf zero() { return set1(0.0f); }

// Sixteen bytes, or the sixteen half bytes of eight (low half first), as floats.
#if defined(__x86_64__)
MANTOU_INLINE Vf load_u8(const uint8_t* p) { return widen_u8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
MANTOU_INLINE Vf load_u4(const uint8_t* p) {
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
  return widen_u8(_mm_unpacklo_epi8(_mm_and_si128(b, low), _mm_and_si128(_mm_srli_epi16(b, 4), low)));
}
#else
MANTOU_INLINE Vf load_u8(const uint8_t* p) { return widen_u8(vld1q_u8(p)); }
MANTOU_INLINE Vf load_u4(const uint8_t* p) {
  const uint8x8x2_t b = vzip_u8(vand_u8(vld1_u8(p), vdup_n_u8(15)), vshr_n_u8(vld1_u8(p), 4));
  return widen_u8(vcombine_u8(b.val[0], b.val[1]));
}
#endif

// The first n (< 16) lanes from memory, zero behind them: never reads past the end.
MANTOU_INLINE Vf load_part(const float* p, int n) {
  alignas(64) float t[kLanes] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return load(t);
}
MANTOU_INLINE void store_part(float* p, Vf a, int n) {
  alignas(64) float t[kLanes];
  store(t, a);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}

// e^x, relative error about 2e-7 (Cephes expf polynomial); exactly 0 below -87.3, infinity above 88.4.
// NaN stays NaN.
MANTOU_INLINE Vf exp(Vf x) {
  Vf c = min(set1(88.7f), max(set1(-87.3f), x));
  Vf n = round_even(mul(c, set1(1.44269504f)));
  Vf r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  Vf p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  return zero_where_below(mul(p, pow2(n)), x, -87.3f);
}

}  // namespace mantou::MANTOU_ISA
