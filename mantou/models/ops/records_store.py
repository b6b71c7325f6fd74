"""Sources of the kernels that make KV records and unpack them. Knows no arrays. See `records_source`."""

from __future__ import annotations

from mantou.models.ops.records_source import RECORD

# k, v [B, heads, W, D] with any strides; signs; consts. Grid: B * heads * W, 2 (keys, values) of 32 threads.
# -> out [B, heads, W, REC]
PACK = (
    RECORD
    + r"""
  constexpr int N = D / 32;
  const int lane = TID, width = k_shape[2], heads = k_shape[1];
  const int t = GX % width, head = GX / width % heads, b = GX / (width * heads);
  const bool keys = GY == 0;
  const DEVICE T* from = keys ? k + b * long(k_strides[0]) + head * long(k_strides[1]) + t * long(k_strides[2])
                              : v + b * long(v_strides[0]) + head * long(v_strides[1]) + t * long(v_strides[2]);
  const long step = keys ? long(k_strides[3]) : long(v_strides[3]);
  DEVICE word* record = out + long(GX) * REC;
  SHARED word codes[D];
  float x[N];
  UNROLL for (int i = 0; i < N; i++) x[i] = float(from[(lane * N + i) * step]);
  if (TURBO) {
    UNROLL for (int i = 0; i < N; i++) x[i] *= signs[lane * N + i];
    hadamard<D, N>(x, lane);
    UNROLL for (int i = 0; i < N; i++) x[i] *= 1.0f / root(float(D));
  }
  if (keys || !BOOK) {
    const float most = float((1 << (keys ? KB : VB)) - 1);
    float low = x[0], high = x[0];
    UNROLL for (int i = 1; i < N; i++) { low = smaller(low, x[i]); high = larger(high, x[i]); }
    for (int s = 1; s < GS / N; s *= 2) {
      low = smaller(low, EXCHANGE(low, s));
      high = larger(high, EXCHANGE(high, s));
    }
    // As mx.quantize: the edge of the larger size is met exactly, and so is zero.
    const bool by_low = size_of(low) > size_of(high);
    float scale = larger((high - low) / most, 1e-7f);
    scale = by_low ? scale : -scale;
    const float edge = by_low ? low : high, steps = nearest(edge / scale);
    scale = steps != 0.0f ? edge / steps : scale;
    const T kept_scale = T(scale), kept_bias = T(steps != 0.0f ? edge : 0.0f);
    const float s_ = float(kept_scale), b_ = float(kept_bias);
    UNROLL for (int i = 0; i < N; i++) {
      codes[lane * N + i] = word(smaller(larger(nearest((x[i] - b_) / s_), 0.0f), most));
    }
    if (lane % (GS / N) == 0) {
      DEVICE word* pair = record + (keys ? KEY_PAIRS : VALUE_PAIRS) + lane * N / GS * PAIR;
      if (PAIR == 2) {
        pair[0] = bits_of(s_);
        pair[PAIR - 1] = bits_of(b_);
      } else {
        pair[0] = half_bits(kept_scale) | (half_bits(kept_bias) << 16);
      }
    }
  } else {
    float squares = 0.0f;
    UNROLL for (int i = 0; i < N; i++) squares += x[i] * x[i];
    for (int s = 1; s < 32; s *= 2) squares += EXCHANGE(squares, s);
    const float deviation = larger(root(squares / float(D)), 1e-20f);
    float along = 0.0f, level_squares = 0.0f;
    UNROLL for (int i = 0; i < N; i++) {
      int index = 0;
      UNROLL for (int e = 0; e < (1 << VB) - 1; e++) index += x[i] / deviation > consts[17 + e] ? 1 : 0;
      const float level = consts[1 + index];
      along += x[i] * level;
      level_squares += level * level;
      codes[lane * N + i] = word(index);
    }
    for (int s = 1; s < 32; s *= 2) {
      along += EXCHANGE(along, s);
      level_squares += EXCHANGE(level_squares, s);
    }
    if (lane == 0) record[VALUE_PAIRS] = bits_of(float(T(along / level_squares)));
  }
  BARRIER();
  const int bits = keys ? KB : VB, num_words = keys ? KEY_WORDS : VALUE_WORDS;
  for (int w = lane; w < num_words; w += 32) {
    word made = 0;
    for (int i = 32 * w / bits; i * bits < 32 * w + 32; i++) {
      const int shift = i * bits - 32 * w;
      made |= shift >= 0 ? codes[i] << shift : codes[i] >> -shift;
    }
    record[(keys ? 0 : KEY_WORDS) + w] = made;
  }
  if (!keys) {  // what fills the record up
    for (int w = VALUE_PAIRS + (BOOK ? 1 : D / GS * PAIR) + lane; w < REC; w += 32) record[w] = 0;
  }
"""
)

# kv, at, signs, consts; a warp a column, 4 columns a block. Grid: columns / 4, B * heads, 2 (keys, values).
# -> keys, values [B, heads, span, D]
UNPACK = (
    RECORD
    + r"""
  constexpr int N = D / 32;
  const int lane = TID % 32, column = GX * 4 + TID / 32, span = at[0], heads = kv_shape[1];
  const int b = GY / heads, head = GY % heads;
  if (column >= span) return;
  const bool is_key = GZ == 0;
  const DEVICE word* record = kv + ((long(at[1 + 2 * b]) * heads + head) * kv_shape[2] + column) * REC;
  float x[N];
  const int bits = is_key ? KB : VB;
  const word mask = (1u << bits) - 1u;
  const DEVICE word* words = record + (is_key ? 0 : KEY_WORDS);
  const DEVICE word* pair = record + (is_key ? KEY_PAIRS : VALUE_PAIRS) + lane * N / GS * PAIR;
  const bool book = BOOK && !is_key;
  const float scale = book ? float_of(record[VALUE_PAIRS])
                    : PAIR == 2 ? float_of(pair[0]) : half_value(pair[0] & 0xffffu, T());
  const float bias = book ? 0.0f : PAIR == 2 ? float_of(pair[PAIR - 1]) : half_value(pair[0] >> 16, T());
  UNROLL for (int i = 0; i < N; i++) {
    const int bit = (lane * N + i) * bits, shift = bit % 32;
    word code = words[bit / 32] >> shift;
    if (shift + bits > 32) code |= words[bit / 32 + 1] << (32 - shift);
    code &= mask;
    x[i] = (book ? consts[1 + (BOOK ? int(code & 15u) : 0)] : float(code)) * scale + bias;
  }
  if (TURBO) {
    hadamard<D, N>(x, lane);
    UNROLL for (int i = 0; i < N; i++) x[i] *= signs[lane * N + i] * (1.0f / root(float(D)));
  }
  const long to = (long(GY) * span + column) * D + lane * N;
  UNROLL for (int i = 0; i < N; i++) {
    if (is_key) keys[to + i] = T(x[i]); else values[to + i] = T(x[i]);
  }
"""
)
