// Kernels on one row of numbers: conversion, norms, gates, rotary embedding. Included once per instruction set.
//
// Arithmetic is f32. Where plain MLX would round an intermediate to the tensors' type (bf16, f16), `round` does the
// same, so that a 16-bit model gives the same text with and without these kernels.

MANTOU_INLINE Vf rounded(Vf x, Scalar to) {
  if (to == Scalar::f32) return x;
  return to == Scalar::bf16 ? round_bf16(x) : round_f16(x);
}

MANTOU_INLINE Vf load_as(const void* p, size_t at, Scalar s) {
  if (s == Scalar::f32) return load(static_cast<const float*>(p) + at);
  const auto* h = static_cast<const uint16_t*>(p) + at;
  return s == Scalar::bf16 ? load_bf16(h) : load_f16(h);
}

MANTOU_INLINE Vf load_as_part(const void* p, size_t at, Scalar s, int n) {
  if (n >= kLanes) return load_as(p, at, s);
  if (s == Scalar::f32) return load_part(static_cast<const float*>(p) + at, n);
  uint16_t t[kLanes] = {};
  std::memcpy(t, static_cast<const uint16_t*>(p) + at, static_cast<size_t>(n) * 2);
  return s == Scalar::bf16 ? load_bf16(t) : load_f16(t);
}

// Calls f(k, lanes) over [0, n): whole vectors, then the rest.
template <class F>
MANTOU_INLINE void each_vector(int n, F&& f) {
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) f(k, kLanes);
  if (k < n) f(k, n - k);
}
MANTOU_INLINE Vf load_n(const float* p, int n) { return n == kLanes ? load(p) : load_part(p, n); }
MANTOU_INLINE void store_n(float* p, Vf a, int n) { n == kLanes ? store(p, a) : store_part(p, a, n); }

static void load_row(const void* from, size_t offset, Scalar s, int n, float* to) {
  if (s == Scalar::f32) {
    std::memcpy(to, static_cast<const float*>(from) + offset, static_cast<size_t>(n) * 4);
    return;
  }
  each_vector(n, [&](int k, int lanes) { store_n(to + k, load_as_part(from, offset + k, s, lanes), lanes); });
}

static void store_row(const float* from, int n, Scalar s, void* to, size_t offset) {
  if (s == Scalar::f32) {
    std::memcpy(static_cast<float*>(to) + offset, from, static_cast<size_t>(n) * 4);
    return;
  }
  auto* out = static_cast<uint16_t*>(to) + offset;
  each_vector(n, [&](int k, int lanes) {
    const Vf x = load_n(from + k, lanes);
    uint16_t t[kLanes];
    uint16_t* at = lanes == kLanes ? out + k : t;
    s == Scalar::bf16 ? store_bf16(at, x) : store_f16(at, x);
    if (lanes < kLanes) std::memcpy(out + k, t, static_cast<size_t>(lanes) * 2);
  });
}

static void round_row(float* x, int n, Scalar s) {
  if (s == Scalar::f32) return;
  each_vector(n, [&](int k, int lanes) { store_n(x + k, rounded(load_n(x + k, lanes), s), lanes); });
}

static void add_row(float* x, const float* y, int n) {
  each_vector(n, [&](int k, int lanes) { store_n(x + k, add(load_n(x + k, lanes), load_n(y + k, lanes)), lanes); });
}

MANTOU_INLINE void store_as(void* p, size_t at, Scalar s, Vf x) {
  if (s == Scalar::f32) return store(static_cast<float*>(p) + at, x);
  auto* h = static_cast<uint16_t*>(p) + at;
  s == Scalar::bf16 ? store_bf16(h, x) : store_f16(h, x);
}

// Sum of f(k, lanes) in four chains: the order depends on n alone.
template <class F>
MANTOU_INLINE float sum_row(int n, F&& f) {
  Vf acc[4] = {zero(), zero(), zero(), zero()};
  int k = 0;
  for (; k + 4 * kLanes <= n; k += 4 * kLanes)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[c] = f(k + c * kLanes, kLanes, acc[c]);
  for (int c = 0; k < n; ++c, k += kLanes) acc[c & 3] = f(k, n - k < kLanes ? n - k : kLanes, acc[c & 3]);
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

static float dot_row(const float* x, const float* y, int n) {
  return sum_row(n, [&](int k, int lanes, Vf acc) { return fma(load_n(x + k, lanes), load_n(y + k, lanes), acc); });
}

static void axpy_row(float a, const float* x, int n, float* y) {
  const Vf va = set1(a);
  each_vector(n, [&](int k, int lanes) {
    store_n(y + k, fma(va, load_n(x + k, lanes), load_n(y + k, lanes)), lanes);
  });
}

static void rms_norm_row(const float* x, const float* weight, float eps, int n, Scalar round, float* y) {
  const float squares = dot_row(x, x, n);
  const Vf r = set1(1.0f / std::sqrt(squares / static_cast<float>(n) + eps));
  each_vector(n, [&](int k, int lanes) {
    Vf v = rounded(mul(load_n(x + k, lanes), r), round);
    if (weight != nullptr) v = rounded(mul(v, load_n(weight + k, lanes)), round);
    store_n(y + k, v, lanes);
  });
}

static void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int n, Scalar round,
                           float* y) {
  const float mean = sum_row(n, [&](int k, int lanes, Vf acc) { return add(acc, load_n(x + k, lanes)); }) /
                     static_cast<float>(n);
  // Deviations first (two passes): E[x^2] - E[x]^2 would lose digits when the mean is large.
  const float squares = sum_row(n, [&](int k, int lanes, Vf acc) {
    const Vf d = sub(load_n(x + k, lanes), lanes == kLanes ? set1(mean) : [&] {
      alignas(64) float t[kLanes] = {};
      for (int i = 0; i < lanes; ++i) t[i] = mean;
      return load(t);
    }());
    return fma(d, d, acc);
  });
  const Vf r = set1(1.0f / std::sqrt(squares / static_cast<float>(n) + eps)), m = set1(mean);
  each_vector(n, [&](int k, int lanes) {
    Vf v = rounded(mul(sub(load_n(x + k, lanes), m), r), round);
    if (weight != nullptr) v = rounded(mul(v, load_n(weight + k, lanes)), round);
    if (bias != nullptr) v = rounded(add(v, load_n(bias + k, lanes)), round);
    store_n(y + k, v, lanes);
  });
}

// Of |x|, mirrored, and in 16 bits with a rounded exponential: where plain MLX rounds, or a tenth of all gates differ.
MANTOU_INLINE Vf sigmoid(Vf x, Scalar round) {
  const Vf below = div(set1(1.0f), add(set1(1.0f), rounded(exp(abs(x)), round)));
  const Vf above = sub(set1(1.0f), below);
  return add(zero_where_below(above, x, 0.0f), sub(below, zero_where_below(below, x, 0.0f)));
}

MANTOU_INLINE Vf gelu_tanh(Vf x) {
  const Vf cube = mul(mul(x, x), x);
  const Vf inner = mul(set1(0.79788456f), fma(set1(0.044715f), cube, x));
  const Vf tanh = sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp(add(inner, inner)))));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh));
}

MANTOU_INLINE Vf gelu_erf(Vf x) {
  // x/2 (1 + erf(x/sqrt 2)) = max(x, 0) - |x|/2 erfc(|x|/sqrt 2); erfc by Abramowitz and Stegun 7.1.26, error < 1.5e-7.
  const Vf size = abs(x), z = mul(size, set1(0.70710678f));
  const Vf t = div(set1(1.0f), fma(set1(0.3275911f), z, set1(1.0f)));
  Vf p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const Vf erfc = mul(mul(p, t), exp(sub(zero(), mul(z, z))));
  return sub(max(x, zero()), mul(mul(set1(0.5f), size), erfc));
}

MANTOU_INLINE Vf activated(Gate kind, Vf x, Scalar round) {
  switch (kind) {
    case Gate::silu: return rounded(mul(x, rounded(sigmoid(x, round), round)), round);
    case Gate::gelu_tanh: return rounded(gelu_tanh(x), round);
    default: return rounded(gelu_erf(x), round);
  }
}

static void gate_row(Gate kind, const float* gate, const float* up, int n, Scalar round, float* y) {
  each_vector(n, [&](int k, int lanes) {
    Vf a = activated(kind, load_n(gate + k, lanes), round);
    if (up != nullptr) a = rounded(mul(a, load_n(up + k, lanes)), round);
    store_n(y + k, a, lanes);
  });
}

static void finish_tile(const float* x, int tokens, int n, const Finish& how, const size_t* at, void* out) {
  const Scalar s = how.type;
  const Vf bias = how.bias != nullptr ? load_n(how.bias, n) : zero();
  for (int m = 0; m < tokens; ++m) {
    Vf v = rounded(load(x + m * kLanes), s);
    if (how.bias != nullptr) v = rounded(add(v, bias), s);
    if (how.activated) v = activated(how.activation, v, s);
    if (how.residual != nullptr) v = rounded(add(v, load_as_part(how.residual, at[m], s, n)), s);
    if (n == kLanes) {
      store_as(out, at[m], s, v);
    } else {
      alignas(64) float part[kLanes];
      store(part, v);
      store_row(part, n, s, out, at[m]);
    }
  }
}

// (a, b) -> (a cos - b sin, a sin + b cos), without fused multiply-add: the bits of plain MLX.
MANTOU_INLINE void rotate(Vf& a, Vf& b, Vf c, Vf s, Scalar round) {
  const Vf x = sub(rounded(mul(a, c), round), rounded(mul(b, s), round));
  const Vf y = add(rounded(mul(a, s), round), rounded(mul(b, c), round));
  a = rounded(x, round), b = rounded(y, round);
}

static void rope_row(const float* x, int n, int dims, bool traditional, const float* cs, Scalar round, float* y) {
  const int half = dims / 2;
  const float *c = cs, *s = cs + half;
  each_vector(half, [&](int k, int lanes) {
    alignas(64) float ta[kLanes] = {}, tb[kLanes] = {};
    Vf a, b;
    if (traditional) {
      for (int i = 0; i < lanes; ++i) ta[i] = x[2 * (k + i)], tb[i] = x[2 * (k + i) + 1];
      a = load(ta), b = load(tb);
    } else {
      a = load_n(x + k, lanes), b = load_n(x + half + k, lanes);
    }
    rotate(a, b, rounded(load_n(c + k, lanes), round), rounded(load_n(s + k, lanes), round), round);
    if (traditional) {
      store(ta, a), store(tb, b);
      for (int i = 0; i < lanes; ++i) y[2 * (k + i)] = ta[i], y[2 * (k + i) + 1] = tb[i];
    } else {
      store_n(y + k, a, lanes), store_n(y + half + k, b, lanes);
    }
  });
  if (y != x) std::memcpy(y + dims, x + dims, static_cast<size_t>(n - dims) * 4);
}
