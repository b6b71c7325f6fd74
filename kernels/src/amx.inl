// Many tokens on AMX: the integer products of a unit for 16 rows and up to 16 tokens are one instruction a plane.
// Included after affine.inl, whose tile of activations it reads and whose bits it gives: integer sums are exact in any
// order, and what is done to them in floats is the same, in the same order. Instructions are written as assembly, since
// a compiler that knows no AMX may still compile this with an assembler that does.
//
// MANTOU_AMX_EMULATED replaces the eight instructions by plain loops, for tests on a processor without AMX.

// Tile registers: 0 and 1 sums (tokens x 16 rows) of the high and low plane, 2 and 3 activations (tokens x 32 bytes),
// 4 weights (8 x 64 bytes, which is how a unit lies in packed.h).
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit AmxShapes(int tokens) {
    for (int t = 0; t < 4; ++t) rows[t] = static_cast<uint8_t>(tokens), row_bytes[t] = t < 2 ? 64 : 32;
    rows[4] = 8, row_bytes[4] = 64;
  }
};

#if defined(MANTOU_AMX_EMULATED)

struct AmxState {
  AmxShapes shapes{0};
  uint8_t tile[8][16][64];
};
static thread_local AmxState amx_state;

static void amx_shape(const AmxShapes& shapes) { amx_state.shapes = shapes; }
static void amx_release() { amx_state.shapes = AmxShapes{0}; }
template <int T>
static void amx_zero() {
  std::memset(amx_state.tile[T], 0, sizeof(amx_state.tile[T]));
}
template <int T>
static void amx_load(const void* from, size_t stride) {
  for (int r = 0; r < amx_state.shapes.rows[T]; ++r)
    std::memcpy(amx_state.tile[T][r], static_cast<const uint8_t*>(from) + r * stride, amx_state.shapes.row_bytes[T]);
}
template <int T>
static void amx_store(void* to, size_t stride) {
  for (int r = 0; r < amx_state.shapes.rows[T]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, amx_state.tile[T][r], amx_state.shapes.row_bytes[T]);
}
// sums += signed bytes of `activations` times unsigned bytes of `weights`, four at a time.
template <int SUMS, int ACTIVATIONS, int WEIGHTS>
static void amx_multiply() {
  for (int m = 0; m < amx_state.shapes.rows[SUMS]; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      std::memcpy(&sum, &amx_state.tile[SUMS][m][4 * n], 4);
      for (int k = 0; k < amx_state.shapes.row_bytes[ACTIVATIONS]; ++k)
        sum += static_cast<int8_t>(amx_state.tile[ACTIVATIONS][m][k]) * amx_state.tile[WEIGHTS][k / 4][4 * n + k % 4];
      std::memcpy(&amx_state.tile[SUMS][m][4 * n], &sum, 4);
    }
}

#else

MANTOU_INLINE void amx_shape(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
MANTOU_INLINE void amx_release() { asm volatile("tilerelease"); }
template <int T>
MANTOU_INLINE void amx_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
MANTOU_INLINE void amx_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
MANTOU_INLINE void amx_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int SUMS, int ACTIVATIONS, int WEIGHTS>
MANTOU_INLINE void amx_multiply() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ACTIVATIONS), "i"(WEIGHTS));
}

#endif

// The bytes of a unit, [8][64].
template <int BITS>
MANTOU_INLINE void unfold_unit(const uint8_t* p, uint8_t* to) {
#if defined(__AVX512F__)
  __m512i v[8];
  load_unit<BITS>(p, v);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm512_store_si512(to + 64 * i, v[i]);
#else
  for (int i = 0; i < 16; ++i)
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 * i), load_half<BITS>(p, i / 2, i % 2));
#endif
}

// 256 * high + low of sixteen sums.
MANTOU_INLINE Vf joined(const int32_t* high, const int32_t* low) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low)))};
#else
  alignas(64) float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = static_cast<float>(high[i] * 256 + low[i]);
  return load(sums);
#endif
}
MANTOU_INLINE Vf widened(const int32_t* sums) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_load_si512(sums))};
#else
  alignas(64) float wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = static_cast<float>(sums[i]);
  return load(wide);
#endif
}

// While a unit is multiplied, the next one is unfolded and the sums of the last are taken: bytes that were just written
// reach a tile register late, and the other way round.
template <int BITS, int MT, int PLANES>
static void amx_tile(const Layout& l, const uint8_t* p, const uint8_t* x, const UnitScale* xs, int tokens, float* out) {
  const int units = l.k / kUnit, units_per_group = l.group / kUnit;
  const size_t scale_bytes = 16 * size_of(l.scalar), unit_bytes = static_cast<size_t>(64) * BITS;
  const size_t group_bytes = unit_bytes * units_per_group + (l.centred ? scale_bytes : 2 * scale_bytes);
  alignas(64) uint8_t values[2][8 * 64];
  alignas(64) int32_t sums[2][PLANES][MT * 16];
  Vf acc[MT];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) acc[m] = zero();
  const auto unfold = [&](int u) {
    unfold_unit<BITS>(p + u / units_per_group * group_bytes + u % units_per_group * unit_bytes, values[u & 1]);
  };
  const auto take = [&](int u) {
    const uint8_t* sp = p + u / units_per_group * group_bytes + unit_bytes * units_per_group;
    const Vf scale = load_scales(sp, l.scalar), bias = load_biases(l, sp + scale_bytes, scale);
    const UnitScale* us = xs + static_cast<size_t>(u) * tokens;
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const int32_t* high = sums[u & 1][0] + 16 * m;
      const Vf dot = PLANES == 2 ? joined(high, sums[u & 1][PLANES - 1] + 16 * m) : widened(high);
      acc[m] = fma(mul(dot, scale), set1(us[m].scale), acc[m]);
      acc[m] = fma(bias, set1(us[m].sum), acc[m]);
    }
  };
  const AmxShapes shapes(MT);
  amx_shape(shapes);
  unfold(0);
  for (int u = 0; u < units; ++u) {
    const uint8_t* xu = x + static_cast<size_t>(64) * tokens * u;
    amx_zero<0>();
    amx_load<4>(values[u & 1], 64);
    amx_load<2>(xu, 64);
    amx_multiply<0, 2, 4>();
    if constexpr (PLANES == 2) {
      amx_zero<1>();
      amx_load<3>(xu + 32, 64);
      amx_multiply<1, 3, 4>();
    }
    if (u + 1 < units) unfold(u + 1);
    amx_store<0>(sums[u & 1][0], 64);
    if constexpr (PLANES == 2) amx_store<1>(sums[u & 1][1], 64);
    if (u > 0) take(u - 1);
  }
  take(units - 1);
  amx_release();
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) store(out + 16 * m, acc[m]);
}

// Where tiles are quicker than vpdpbusd (measured on a Xeon in a virtual machine: 1.1 to 1.35 times as fast from 1024
// inputs on; short rows, few tokens and single planes gain nothing). Bits are the same, so the choice is free.
#if defined(MANTOU_AMX_EMULATED)
constexpr int kAmxSteps[] = {16, 12, 8, 6, 4, 3, 2, 1};
MANTOU_INLINE bool amx_pays(const Layout&, int, int) { return true; }
#else
constexpr auto& kAmxSteps = kTileSteps;
MANTOU_INLINE bool amx_pays(const Layout& l, int tokens, int planes) {
  return l.k >= 1024 && tokens >= (planes == 2 ? 8 : 12);
}
#endif

template <int BITS, int PLANES>
static AffineTile amx_tile_for(int step) {
  switch (step) {
    case 16: return amx_tile<BITS, 16, PLANES>;
    case 12: return amx_tile<BITS, 12, PLANES>;
    case 8: return amx_tile<BITS, 8, PLANES>;
#if defined(MANTOU_AMX_EMULATED)
    case 6: return amx_tile<BITS, 6, PLANES>;
    case 4: return amx_tile<BITS, 4, PLANES>;
    case 3: return amx_tile<BITS, 3, PLANES>;
    case 2: return amx_tile<BITS, 2, PLANES>;
    default: return amx_tile<BITS, 1, PLANES>;
#else
    default: return affine_tile_for<BITS, PLANES>(step);
#endif
  }
}

template <int BITS>
static void amx_affine_block(const Layout& l, const uint8_t* block, const uint8_t* tile, int tokens, int planes, float* out) {
  const UnitScale* scales = tile_scales(l, tokens, const_cast<uint8_t*>(tile));
  int done = 0;
  for (int step : kAmxSteps)
    for (; tokens - done >= step; done += step) {
      AffineTile f = planes == 1 ? amx_tile_for<BITS, 1>(step) : amx_tile_for<BITS, 2>(step);
      f(l, block, tile + 64 * done, scales + done, tokens, out + 16 * done);
    }
}

static void amx_block(const Layout& l, const uint8_t* p, const uint8_t* tile, int tokens, int planes, float* out) {
  if (!amx_pays(l, tokens, planes)) return affine(l, p, tile, tokens, planes, out);
  switch (l.bits) {
    case 2: return amx_affine_block<2>(l, p, tile, tokens, planes, out);
    case 3: return amx_affine_block<3>(l, p, tile, tokens, planes, out);
    case 4: return amx_affine_block<4>(l, p, tile, tokens, planes, out);
    case 5: return amx_affine_block<5>(l, p, tile, tokens, planes, out);
    case 6: return amx_affine_block<6>(l, p, tile, tokens, planes, out);
    default: return amx_affine_block<8>(l, p, tile, tokens, planes, out);
  }
}

// Whether the instructions give what they should: for the probe, which runs this in a process of its own.
[[maybe_unused]] static bool amx_multiplies() {
  alignas(64) uint8_t weights[8 * 64];
  alignas(64) int8_t activations[16 * 32];
  alignas(64) int32_t sums[16 * 16];
  for (int i = 0; i < 8 * 64; ++i) weights[i] = static_cast<uint8_t>(37 * i + 5);
  for (int i = 0; i < 16 * 32; ++i) activations[i] = static_cast<int8_t>(91 * i + 3);
  const AmxShapes shapes(16);
  amx_shape(shapes);
  amx_zero<0>();
  amx_load<2>(activations, 32);
  amx_load<4>(weights, 64);
  amx_multiply<0, 2, 4>();
  amx_store<0>(sums, 64);
  amx_release();
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int sum = 0;
      for (int k = 0; k < 32; ++k) sum += activations[m * 32 + k] * weights[k / 4 * 64 + 4 * n + k % 4];
      if (sums[m * 16 + n] != sum) return false;
    }
  return true;
}
