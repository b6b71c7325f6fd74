// Many tokens on AMX: the integer products of a unit for 16 rows and up to 16 tokens are one instruction a plane.
// Included after affine.inl, whose tile of activations it reads and whose bits it gives: integer sums are exact in any
// order, and what is done to them in floats is the same, in the same order. Instructions are written as assembly, since
// a compiler that knows no AMX may still compile this with an assembler that does.
//
// Blocks are opened first: the bytes of every unit, [units][8][64], and its scales and biases as floats, [units][2][16].
// Where a block has several tiles it is opened once for all of them, else in parts. Not unit by unit: bytes that were just
// written reach a tile register late.
//
// MANTOU_AMX_EMULATED replaces the eight instructions by plain loops, for tests on a processor without AMX.

// Tile registers: 0 to 3 sums (tokens x 16 rows), 4 and 5 activations (tokens x 32 bytes), 6 and 7 weights (8 x 64
// bytes, which is how an opened unit lies).
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit AmxShapes(int tokens) {
    for (int t = 0; t < 6; ++t) rows[t] = static_cast<uint8_t>(tokens), row_bytes[t] = t < 4 ? 64 : 32;
    for (int t = 6; t < 8; ++t) rows[t] = 8, row_bytes[t] = 64;
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
template <int T, size_t>
static void amx_load(const void* from, size_t stride) {
  for (int r = 0; r < amx_state.shapes.rows[T]; ++r)
    std::memcpy(amx_state.tile[T][r], static_cast<const uint8_t*>(from) + r * stride, amx_state.shapes.row_bytes[T]);
}
template <int T, size_t>
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
// BYTES is how far the rows reach: with it the compiler knows what is read and written, and keeps the rest in registers.
template <int T, size_t BYTES>
MANTOU_INLINE void amx_load(const void* from, size_t stride) {
  const auto& all = *static_cast<const uint8_t(*)[BYTES]>(from);
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T), "m"(all));
}
template <int T, size_t BYTES>
MANTOU_INLINE void amx_store(void* to, size_t stride) {
  auto& all = *static_cast<uint8_t(*)[BYTES]>(to);
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(all) : "r"(to), "r"(stride), "i"(T));
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

template <int BITS>
static const uint8_t* amx_open_bits(const Layout& l, const uint8_t* p, int units, uint8_t* values, float* scales) {
  const int units_per_group = l.group / kUnit;
  const size_t scale_bytes = 16 * size_of(l.scalar);
  for (int u = 0; u < units;) {
    const uint8_t* sp = p + static_cast<size_t>(64) * BITS * units_per_group;
    const Vf scale = load_scales(sp, l.scalar), bias = load_biases(l, sp + scale_bytes, scale);
    for (int j = 0; j < units_per_group; ++j, ++u, p += 64 * BITS, values += 8 * 64, scales += 32) {
      unfold_unit<BITS>(p, values);
      store(scales, scale), store(scales + 16, bias);
    }
    p += l.centred ? scale_bytes : 2 * scale_bytes;
  }
  return p;
}

// Opens `units` units from p on, whole groups. Returns where the next ones lie.
static const uint8_t* amx_open_units(const Layout& l, const uint8_t* p, int units, uint8_t* values, float* scales) {
  switch (l.bits) {
    case 2: return amx_open_bits<2>(l, p, units, values, scales);
    case 3: return amx_open_bits<3>(l, p, units, values, scales);
    case 4: return amx_open_bits<4>(l, p, units, values, scales);
    case 5: return amx_open_bits<5>(l, p, units, values, scales);
    case 6: return amx_open_bits<6>(l, p, units, values, scales);
    default: return amx_open_bits<8>(l, p, units, values, scales);
  }
}

MANTOU_INLINE size_t amx_scales_offset(const Layout& l) { return static_cast<size_t>(l.k / kUnit) * 8 * 64; }

static void amx_open(const Layout& l, const uint8_t* p, uint8_t* to) {
  amx_open_units(l, p, l.k / kUnit, to, reinterpret_cast<float*>(to + amx_scales_offset(l)));
}

// Shaping takes as long as a unit's products, so it is done when a thread meets another number of tokens.
static thread_local int amx_tokens = 0;
static void amx_want(int tokens) {
  if (amx_tokens == tokens) return;
  const AmxShapes shapes(tokens);
  amx_shape(shapes);
  amx_tokens = tokens;
}
// A thread that keeps tile registers makes every switch to another one dearer.
static void amx_rest() {
  if (amx_tokens == 0) return;
  amx_release();
  amx_tokens = 0;
}

// The steps of a tile of MT tokens. SET says which of two sets of tile registers a unit uses.
template <int MT, int PLANES>
struct AmxTile {
  using Sums = int32_t[PLANES][MT * 16];
  static constexpr size_t x_bytes = static_cast<size_t>(64) * MT, reach = x_bytes - 32;

  template <int SET>
  MANTOU_INLINE void multiply(const uint8_t* values, const uint8_t* x) {
    amx_zero<2 * SET>();
    amx_load<6 + SET, 8 * 64>(values, 64);
    amx_load<4, reach>(x, 64);
    amx_multiply<2 * SET, 4, 6 + SET>();
    if constexpr (PLANES == 2) {
      amx_zero<2 * SET + 1>();
      amx_load<5, reach>(x + 32, 64);
      amx_multiply<2 * SET + 1, 5, 6 + SET>();
    }
  }

  template <int SET>
  MANTOU_INLINE void keep(Sums& sums) {
    amx_store<2 * SET, 64 * MT>(sums[0], 64);
    if constexpr (PLANES == 2) amx_store<2 * SET + 1, 64 * MT>(sums[1], 64);
  }

  MANTOU_INLINE void take(const Sums& sums, const float* scales, const UnitScale* xs, Vf (&acc)[MT]) {
    const Vf scale = load(scales), bias = load(scales + 16);
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const Vf dot = PLANES == 1 ? widened(sums[0] + 16 * m) : joined(sums[0] + 16 * m, sums[PLANES - 1] + 16 * m);
      acc[m] = fma(mul(dot, scale), set1(xs[m].scale), acc[m]);
      acc[m] = fma(bias, set1(xs[m].sum), acc[m]);
    }
  }
};

// Opened weights of some units, and what will be opened after them, `ahead` bytes a unit of these.
struct AmxUnits {
  const uint8_t* values;
  const float* scales;
  int count;
  const uint8_t* next;
  size_t ahead;

  // Opening asks memory for much at once and multiplying for nothing, so multiplying asks for what is opened next.
  inline __attribute__((always_inline)) void ask() {
    for (size_t i = 0; i < ahead; i += 64) __builtin_prefetch(next + i);
    next += ahead;
  }
};

// Adds the products of some units. While unit u is multiplied, the sums of u - 1 are stored and those of u - 2 are taken.
template <int MT, int PLANES>
MANTOU_INLINE void amx_tile(AmxUnits w, const uint8_t* x, const UnitScale* xs, Vf (&acc)[MT]) {
  using Tile = AmxTile<MT, PLANES>;
  constexpr size_t value_bytes = 8 * 64, x_bytes = Tile::x_bytes;
  alignas(64) typename Tile::Sums even, odd;
  Tile::template multiply<0>(w.values, x);
  for (int u = 1; u < w.count; ++u) {
    w.values += value_bytes, x += x_bytes;
    Tile::template multiply<1>(w.values, x);
    w.ask();
    Tile::template keep<0>(even);
    if (u > 1) {
      Tile::take(odd, w.scales, xs, acc);
      w.scales += 32, xs += MT;
    }
    if (++u == w.count) break;
    w.values += value_bytes, x += x_bytes;
    Tile::template multiply<0>(w.values, x);
    w.ask();
    Tile::template keep<1>(odd);
    Tile::take(even, w.scales, xs, acc);
    w.scales += 32, xs += MT;
  }
  if (w.count % 2 == 1) {
    if (w.count > 1) {
      Tile::take(odd, w.scales, xs, acc);
      w.scales += 32, xs += MT;
    }
    Tile::template keep<0>(even);
    Tile::take(even, w.scales, xs, acc);
  } else {
    Tile::take(even, w.scales, xs, acc);
    Tile::template keep<1>(odd);
    Tile::take(odd, w.scales + 32, xs + MT, acc);
  }
}

template <int MT, int PLANES>
static void amx_opened_tile(const Layout& l, const uint8_t* block, const uint8_t* x, const UnitScale* xs, float* out) {
  Vf acc[MT];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) acc[m] = zero();
  amx_want(MT);
  const auto* scales = reinterpret_cast<const float*>(block + amx_scales_offset(l));
  amx_tile<MT, PLANES>({block, scales, l.k / kUnit, nullptr, 0}, x, xs, acc);
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) store(out + 16 * m, acc[m]);
}

// A block that has one tile: opened and multiplied in parts that stay in the first-level cache.
template <int MT, int PLANES>
static void amx_packed_tile(const Layout& l, const uint8_t* p, const uint8_t* x, const UnitScale* xs, float* out) {
  constexpr int kPart = 16;  // units: whole groups, an even number
  alignas(64) uint8_t values[kPart * 8 * 64];
  alignas(64) float scales[kPart * 32];
  Vf acc[MT];
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) acc[m] = zero();
  amx_want(MT);
  const int units = l.k / kUnit;
  for (int u = 0; u < units; u += kPart) {
    const int count = units - u < kPart ? units - u : kPart;
    const uint8_t* next = amx_open_units(l, p, count, values, scales);
    const size_t at = static_cast<size_t>(u) * MT;
    amx_tile<MT, PLANES>({values, scales, count, next, static_cast<size_t>(next - p) / count}, x + 64 * at, xs + at, acc);
    p = next;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m) store(out + 16 * m, acc[m]);
}

// Fewer tokens than this are quicker on vpdpbusd. A single tile, where opening a block pays only once, must be full, and
// then gains little; decoding steps of 8 rows lost 10 % through it, though a loop of nothing else gained. (Measured on a
// Xeon in a virtual machine.) Bits are the same, so the choice is free.
#if defined(MANTOU_AMX_EMULATED)
constexpr int kAmxFew = 1, kAmxAlone = 1;
#else
constexpr int kAmxFew = 9, kAmxAlone = kAffineTile;
#endif

static size_t amx_opened_bytes(const Layout& l, int tokens) {
  if (l.form != Form::affine || tokens < kAmxFew) return 0;
  return amx_scales_offset(l) + static_cast<size_t>(l.k / kUnit) * 2 * 16 * sizeof(float);
}

template <int MT = kAffineTile>
static void amx_opened(const Layout& l, const uint8_t* block, const uint8_t* tile, int tokens, int planes, float* out) {
  if constexpr (MT > kAmxFew)
    if (tokens < MT) return amx_opened<MT - 1>(l, block, tile, tokens, planes, out);
  const UnitScale* scales = tile_scales(l, MT, const_cast<uint8_t*>(tile));
  planes == 1 ? amx_opened_tile<MT, 1>(l, block, tile, scales, out) : amx_opened_tile<MT, 2>(l, block, tile, scales, out);
}

template <int MT = kAffineTile>
static void amx_packed(const Layout& l, const uint8_t* block, const uint8_t* tile, int tokens, int planes, float* out) {
  if constexpr (MT > kAmxAlone)
    if (tokens < MT) return amx_packed<MT - 1>(l, block, tile, tokens, planes, out);
  const UnitScale* scales = tile_scales(l, MT, const_cast<uint8_t*>(tile));
  planes == 1 ? amx_packed_tile<MT, 1>(l, block, tile, scales, out) : amx_packed_tile<MT, 2>(l, block, tile, scales, out);
}

static void amx_block(const Layout& l, const uint8_t* p, const uint8_t* tile, int tokens, int planes, float* out) {
  tokens < kAmxAlone ? affine(l, p, tile, tokens, planes, out) : amx_packed(l, p, tile, tokens, planes, out);
}

// Whether the instructions give what they should: for the probe, which runs this in a process of its own.
[[maybe_unused]] static bool amx_multiplies() {
  alignas(64) uint8_t weights[8 * 64];
  alignas(64) int8_t activations[16 * 32];
  alignas(64) int32_t sums[16 * 16];
  for (int i = 0; i < 8 * 64; ++i) weights[i] = static_cast<uint8_t>(37 * i + 5);
  for (int i = 0; i < 16 * 32; ++i) activations[i] = static_cast<int8_t>(91 * i + 3);
  amx_want(16);
  amx_zero<0>();
  amx_load<4, 16 * 32>(activations, 32);
  amx_load<6, 8 * 64>(weights, 64);
  amx_multiply<0, 4, 6>();
  amx_store<0, 16 * 64>(sums, 64);
  amx_rest();
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int sum = 0;
      for (int k = 0; k < 32; ++k) sum += activations[m * 32 + k] * weights[k / 4 * 64 + 4 * n + k % 4];
      if (sums[m * 16 + n] != sum) return false;
    }
  return true;
}
