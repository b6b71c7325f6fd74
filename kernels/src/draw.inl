// The loops over a vocabulary that drawing a token needs (draw.h). Included once per instruction set: written for the
// compiler to vectorise, each element on its own, so that lanes change no bit.

// As MLX's exp on a CPU (mlx/backend/cpu/simd/math.h). A NaN takes a number's way, since no integer is cast from it, and
// comes back as itself.
MANTOU_INLINE float mlx_exp(float x) {
  float clipped = x > -89.0f ? x : -89.0f;
  clipped = clipped > 89.0f ? 89.0f : clipped;
  const float t = clipped * 1.442695f, below = __builtin_floorf(t);
  const float whole = below + (t - below >= 0.5f ? 1.0f : 0.0f), f = t - whole;
  float p = __builtin_fmaf(1.535336188319500e-4f, f, 1.339887440266574e-3f);
  p = __builtin_fmaf(p, f, 9.618437357674640e-3f);
  p = __builtin_fmaf(p, f, 5.550332471162809e-2f);
  p = __builtin_fmaf(p, f, 2.402264791363012e-1f);
  p = __builtin_fmaf(p, f, 6.931472028550421e-1f);
  p = __builtin_fmaf(p, f, 1.0f);
  const float y = __builtin_bit_cast(float, (static_cast<int32_t>(whole) + 127) * (1 << 23)) * p;
  const float finite = x > 88.0f ? INFINITY : y;
  const float number = x < -88.0f ? 0.0f : finite;
  return x != x ? x : number;
}

static void exp_row(const float* x, float shift, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = mlx_exp(x[i] - shift);
}

// What is added for each byte of eight bits: without a branch, and with the bits of the plain sampler's sum.
struct Penalties {
  float of[256][8];
  constexpr Penalties() : of() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit) of[byte][bit] = (byte >> bit & 1) != 0 ? 0.0f : -__builtin_inff();
  }
};

static void restrict_row(const float* x, const uint8_t* bits, int n, float* y) {
  static constexpr Penalties penalties;
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) y[i + j] = x[i + j] + penalties.of[bits[i / 8]][j];
  for (; i < n; ++i) y[i] = x[i] + penalties.of[bits[i / 8]][i % 8];
}

static float highest_of(const float* x, int n) {
  Vf top = set1(-INFINITY);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max(load(x + i), top);
  float highest = reduce_max(top);
  for (; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
  return highest;
}

// While a sum stays in one binade, adding p moves it by p / ulp rounded to the nearest integer, whatever the order, if
// p is not half between two. So blocks are added as integers, and value by value only where that does not hold.
static float add_in_order(float s, const float* p, int n) {
  constexpr int kBlock = 64;
  for (int i = 0; i < n; i += kBlock) {
    const int m = n - i < kBlock ? n - i : kBlock;
    if (s >= 0x1p-60f && s < 0x1p60f) {
      const int exponent = static_cast<int>(__builtin_bit_cast(uint32_t, s) >> 23) - 127;
      const float scale = __builtin_bit_cast(float, (23 - exponent + 127) << 23);
      int32_t sum = 0, inexact = 0;
      for (int j = i; j < i + m; ++j) {
        const float x = p[j] * scale, clipped = x < 0x1p24f ? x : 0x1p24f, r = __builtin_rintf(clipped);
        inexact |= (__builtin_fabsf(clipped - r) == 0.5f ? 1 : 0) | (x >= 0x1p24f ? 1 : 0);
        sum += static_cast<int32_t>(r);
      }
      const int64_t units = static_cast<int64_t>(s * scale) + sum;
      if (inexact == 0 && units < 1 << 24) {
        s = static_cast<float>(units) / scale;
        continue;
      }
    }
    for (int j = i; j < i + m; ++j) s += p[j];
  }
  return s;
}

static void bucket_row(const float* logprobs, const float* probs, int n, float scale, int32_t* bucket, int32_t* units) {
  for (int i = 0; i < n; ++i) {
    const float x = probs[i] * scale, r = __builtin_rintf(x), at = (Buckets::kHead - logprobs[i]) * Buckets::kPerUnit;
    const float b = at < Buckets::kCount - 1.0f ? at : Buckets::kCount - 1.0f;
    const bool tail = (logprobs[i] < Buckets::kHead) & (probs[i] >= 0x1p-26f);
    const int32_t tie = __builtin_fabsf(x - r) == 0.5f ? Buckets::kTie : 0;
    bucket[i] = static_cast<int32_t>(tail ? b : static_cast<float>(Buckets::kNone));
    units[i] = tail ? static_cast<int32_t>(r) | tie : 0;
  }
}

template <class F>
MANTOU_INLINE int select_where(int n, int32_t* index, F&& wanted) {
  constexpr int kBlock = 64;
  int count = 0;
  for (int i = 0; i < n; i += kBlock) {
    const int end = n - i < kBlock ? n : i + kBlock;
    int any = 0;
    for (int j = i; j < end; ++j) any |= wanted(j) ? 1 : 0;
    for (int j = i; any != 0 && j < end; ++j)
      if (wanted(j)) index[count++] = j;
  }
  return count;
}

static int select_from(const float* x, int n, float from, int32_t* index) {
  return select_where(n, index, [=](int i) { return x[i] >= from; });
}

static int select_equal(const int32_t* x, int n, int32_t wanted, int32_t* index) {
  return select_where(n, index, [=](int i) { return x[i] == wanted; });
}

MANTOU_INLINE uint32_t mix(uint32_t x) {  // noise.py, with its source
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

// ln u of a normal u > 0 with a relative error below 1e-6 (Cephes logf polynomial).
MANTOU_INLINE float near_log(float u) {
  const int32_t bits = __builtin_bit_cast(int32_t, u), e = (bits - 0x3f3504f3) >> 23;
  const float f = __builtin_bit_cast(float, bits - e * (1 << 23)) - 1.0f, z = f * f;
  float p = __builtin_fmaf(7.0376836292e-2f, f, -1.1514610310e-1f);
  p = __builtin_fmaf(p, f, 1.1676998740e-1f);
  p = __builtin_fmaf(p, f, -1.2420140846e-1f);
  p = __builtin_fmaf(p, f, 1.4249322787e-1f);
  p = __builtin_fmaf(p, f, -1.6668057665e-1f);
  p = __builtin_fmaf(p, f, 2.0000714765e-1f);
  p = __builtin_fmaf(p, f, -2.4999993993e-1f);
  p = __builtin_fmaf(p, f, 3.3333331174e-1f);
  const float y = __builtin_fmaf(-0.5f, z, p * f * z) + f;
  return __builtin_fmaf(static_cast<float>(e), 0.69314718f, y);
}

static void scores_row(const float* x, float gain, uint32_t low, uint32_t high, const float* key, float bound, int n,
                       float* y) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = mix(mix(static_cast<uint32_t>(i) + low) ^ high);
    const float u = static_cast<float>(static_cast<int32_t>(bits >> 9)) * 0x1p-23f + 0x1p-24f;
    y[i] = x[i] * gain - near_log(-near_log(u));
  }
  if (key == nullptr) return;
  for (int i = 0; i < n; ++i) y[i] = (key[i] >= bound) & (key[i] > -INFINITY) ? y[i] : -INFINITY;
}
