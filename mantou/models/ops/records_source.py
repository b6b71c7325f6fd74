"""Sources of the kernels over KV records: one body for CUDA, Metal and a C++ emulation. Knows no arrays.

A record is what one token and one head keep: key codes, value codes, then scales and biases, in 32-bit words. MLX makes
the signature from the names of inputs and outputs and writes template arguments as constants before the body.

Attention splits a row's columns into runs of `CPS`. A warp holds `R` query rows; `D / DPL` lanes share a column. Scale
and bias stay outside the inner product: q . k = s * (q . codes) + b * sum(q), and the same for values. Rotated codecs
rotate the query and, once, the output. `merge` brings the runs together.
"""

from __future__ import annotations

HELPERS = r"""
#define HIDDEN -1e30f  // of scores: finite, so that differences are

// The codes of N values from value `part * N` on, in the low bits of w.
template <int BITS, int N>
FN void load_codes(const DEVICE word* at, int part, PRIVATE word* w) {
  constexpr int WORDS = N * BITS / 32;
  if (N * BITS % 128 == 0) {
    UNROLL for (int i = 0; i < WORDS; i += 4) load4(at + part * WORDS + i, w + i);
    return;
  }
  if (N * BITS == 64) { load2(at + part * 2, w); return; }
  if (N * BITS % 32 == 0) {
    UNROLL for (int i = 0; i < WORDS; i++) w[i] = at[part * WORDS + i];
    return;
  }
  const int first = part * N * BITS, shift = first % 32;
  w[0] = at[first / 32];
  if (BITS != 3) { w[0] >>= shift; return; }
  w[1] = at[first / 32 + 1];
  if (shift != 0) {
    w[0] = (w[0] >> shift) | (w[1] << (32 - shift));
    w[1] >>= shift;
  }
}

template <int BITS>
FN int code(const PRIVATE word* w, int i) {
  const int bit = i * BITS, at = bit / 32, shift = bit % 32;
  const word mask = (1u << BITS) - 1u;
  if (shift + BITS <= 32) return int((w[at] >> shift) & mask);
  return int(((w[at] >> shift) | (w[at + 1] << (32 - shift))) & mask);
}

template <int BITS, int N>
FN void values_of(const PRIVATE word* w, PRIVATE float* out) {
  if (BITS == 8) {
    UNROLL for (int i = 0; i < N; i++) out[i] = byte_value(w[i / 4], i % 4);
  } else {  // 4 bits: even and odd values as bytes
    UNROLL for (int i = 0; i < N; i++) {
      const word pair = i % 2 == 0 ? w[i / 8] & 0x0f0f0f0fu : (w[i / 8] >> 4) & 0x0f0f0f0fu;
      out[i] = byte_value(pair, (i % 8) / 2);
    }
  }
}

// Hadamard's transform of D values, N to a lane, over D / N lanes; unscaled.
template <int D, int N>
FN void hadamard(PRIVATE float* x, int lane) {
  UNROLL for (int s = 1; s < N; s *= 2) {
    UNROLL for (int i = 0; i < N; i++) {
      if ((i & s) == 0) {
        const float a = x[i], b = x[i + s];
        x[i] = a + b;
        x[i + s] = a - b;
      }
    }
  }
  UNROLL for (int s = 1; s < D / N; s *= 2) {
    UNROLL for (int i = 0; i < N; i++) {
      const float other = EXCHANGE(x[i], s);
      x[i] = (lane & s) != 0 ? other - x[i] : x[i] + other;
    }
  }
}
"""

# Words of a record; T, D, KB, VB, GS (0 = values by a codebook take no groups) as template arguments.
RECORD = r"""
  constexpr int KEY_WORDS = D * KB / 32, VALUE_WORDS = D * VB / 32;
  constexpr int PAIR = sizeof(T) == 4 ? 2 : 1;  // words of a scale and a bias
  constexpr int KEY_PAIRS = KEY_WORDS + VALUE_WORDS, VALUE_PAIRS = KEY_PAIRS + D / GS * PAIR;
"""

# q [B, H, W, D]; kv [slots, heads, capacity, REC]; at = [span, slot 0, start 0, slot 1, ..]; signs [D];
# consts = [scale, 16 levels, 15 edges]. Grid: runs, heads x chunks of rows, B.
# -> parts [B * H * W, runs, D], sums [B * H * W, runs, 2]
ATTEND = (
    RECORD
    + r"""
  constexpr int L = D / DPL, COLUMNS = 32 / L, ROWS = RC * R, NUM_WORDS = 4;
  const int lane = TID % 32, warp = TID / 32, dl = lane % L, cg = lane / L;
  const int width = q_shape[2], heads = kv_shape[1], rows = q_shape[1] / heads * width;
  const int head = GY % heads, chunk = (GY / heads) * RC + warp % RC, cw = warp / RC, b = GZ;
  const int start = at[2 + 2 * b], newest = start + width - 1;
  const int end = RING != 0 && newest >= RING ? RING : newest + 1;
  const int first = RING == 0 && WINDOW != 0 && start >= WINDOW ? start - WINDOW + 1 : 0;
  const int c1 = GX * CPS + CPS < end ? GX * CPS + CPS : end;
  const int c0 = GX * CPS > first ? GX * CPS : first;
  if (c0 >= c1) return;
  SHARED float all[CW == 1 ? 1 : CW * ROWS * D];
  SHARED float all_m[CW * ROWS];
  SHARED float all_l[CW * ROWS];
  SHARED float book[16];
  if (BOOK) {
    if (TID < 16) book[TID] = consts[1 + TID];
    BARRIER();
  }
  float q_[R][DPL], q_sum[R], m[R], l[R], acc[R][DPL], acc_bias[R];
  UNROLL for (int r = 0; r < R; r++) {
    const int row = chunk * R + r < rows ? chunk * R + r : rows - 1;
    const DEVICE T* from = q + (long(b * heads + head) * rows + row) * D + dl * DPL;
    UNROLL for (int i = 0; i < DPL; i++) q_[r][i] = float(from[i]);
    if (TURBO) {
      UNROLL for (int i = 0; i < DPL; i++) q_[r][i] *= signs[dl * DPL + i] * (1.0f / root(float(D)));
      hadamard<D, DPL>(q_[r], dl);
    }
    q_sum[r] = 0.0f; m[r] = HIDDEN; l[r] = 0.0f; acc_bias[r] = 0.0f;
    UNROLL for (int i = 0; i < DPL; i++) {
      q_[r][i] *= consts[0];
      q_sum[r] += q_[r][i];
      acc[r][i] = 0.0f;
    }
  }
  const DEVICE word* records = kv + (long(at[1 + 2 * b]) * heads + head) * kv_shape[2] * REC;
  for (int c = c0 + cw * COLUMNS * U; c < c1; c += CW * COLUMNS * U) {
    word kw[U][NUM_WORDS], vw[U][NUM_WORDS];
    float ks[U], kb[U], vs[U], vb[U], score[U][R];
    UNROLL for (int u = 0; u < U; u++) {
      const int column = c + u * COLUMNS + cg < c1 ? c + u * COLUMNS + cg : c1 - 1;
      const DEVICE word* record = records + long(column) * REC;
      load_codes<KB, DPL>(record, dl, kw[u]);
      load_codes<VB, DPL>(record + KEY_WORDS, dl, vw[u]);
      const DEVICE word* pair = record + KEY_PAIRS + dl * DPL / GS * PAIR;
      ks[u] = PAIR == 2 ? float_of(pair[0]) : half_value(pair[0] & 0xffffu, T());
      kb[u] = PAIR == 2 ? float_of(pair[PAIR - 1]) : half_value(pair[0] >> 16, T());
      pair = record + VALUE_PAIRS + (BOOK ? 0 : dl * DPL / GS * PAIR);
      vs[u] = PAIR == 2 || BOOK ? float_of(pair[0]) : half_value(pair[0] & 0xffffu, T());
      vb[u] = BOOK ? 0.0f : PAIR == 2 ? float_of(pair[PAIR - 1]) : half_value(pair[0] >> 16, T());
    }
    UNROLL for (int u = 0; u < U; u++) {
      float k_[DPL];
      values_of<KB, DPL>(kw[u], k_);
      UNROLL for (int r = 0; r < R; r++) {
        float dot = 0.0f;
        UNROLL for (int i = 0; i < DPL; i++) dot += q_[r][i] * k_[i];
        score[u][r] = ks[u] * dot + kb[u] * q_sum[r];
      }
    }
    UNROLL for (int s = 1; s < L; s *= 2) {
      UNROLL for (int u = 0; u < U; u++) {
        UNROLL for (int r = 0; r < R; r++) score[u][r] += EXCHANGE(score[u][r], s);
      }
    }
    UNROLL for (int u = 0; u < U; u++) {
      const int column = c + u * COLUMNS + cg;
      int held = column;  // the position that this column holds
      if (RING != 0) {
        const int back = (newest - column) % (RING != 0 ? RING : 1);
        held = newest - (back < 0 ? back + RING : back);
      }
      UNROLL for (int r = 0; r < R; r++) {
        const int query = start + (chunk * R + r) % width;
        const bool seen = column < c1 && held >= 0 && held <= query && (WINDOW == 0 || held > query - WINDOW);
        score[u][r] = seen ? score[u][r] : HIDDEN;
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      float highest = m[r];
      UNROLL for (int u = 0; u < U; u++) highest = larger(highest, score[u][r]);
      if (highest > m[r]) {
        const float less = pow2(m[r] - highest);
        m[r] = highest;
        l[r] *= less;
        acc_bias[r] *= less;
        UNROLL for (int i = 0; i < DPL; i++) acc[r][i] *= less;
      }
      UNROLL for (int u = 0; u < U; u++) {
        const float p = score[u][r] > 0.5f * HIDDEN ? pow2(score[u][r] - highest) : 0.0f;
        l[r] += p;
        acc_bias[r] += p * vb[u];
        score[u][r] = p * vs[u];
      }
    }
    UNROLL for (int u = 0; u < U; u++) {
      float v_[DPL];
      if (BOOK) {
        UNROLL for (int i = 0; i < DPL; i++) v_[i] = book[code<VB>(vw[u], i)];
      } else {
        values_of<VB, DPL>(vw[u], v_);
      }
      UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < DPL; i++) acc[r][i] += score[u][r] * v_[i];
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) {  // the column groups of a warp
    UNROLL for (int i = 0; i < DPL; i++) acc[r][i] += acc_bias[r];
    UNROLL for (int s = L; s < 32; s *= 2) {
      const float other_m = EXCHANGE(m[r], s), highest = larger(m[r], other_m);
      const float mine = pow2(m[r] - highest), others = pow2(other_m - highest);
      m[r] = highest;
      l[r] = l[r] * mine + EXCHANGE(l[r], s) * others;
      UNROLL for (int i = 0; i < DPL; i++) acc[r][i] = acc[r][i] * mine + EXCHANGE(acc[r][i], s) * others;
    }
  }
  const long out_row = long(b * heads + head) * rows + (GY / heads) * ROWS;
  const int rows_here = rows - (GY / heads) * ROWS < ROWS ? rows - (GY / heads) * ROWS : ROWS;
  if (CW == 1) {
    UNROLL for (int r = 0; r < R; r++) {
      const int row = (warp % RC) * R + r;
      if (cg == 0 && row < rows_here) {
        DEVICE float* to = parts + ((out_row + row) * NUM_GX + GX) * D + dl * DPL;
        UNROLL for (int i = 0; i < DPL; i++) to[i] = acc[r][i];
        if (dl == 0) {
          sums[((out_row + row) * NUM_GX + GX) * 2] = m[r];
          sums[((out_row + row) * NUM_GX + GX) * 2 + 1] = l[r];
        }
      }
    }
    return;
  }
  UNROLL for (int r = 0; r < R; r++) {
    const int row = cw * ROWS + (warp % RC) * R + r;
    if (cg == 0) {
      UNROLL for (int i = 0; i < DPL; i++) all[row * D + i * L + dl] = acc[r][i];
      if (dl == 0) { all_m[row] = m[r]; all_l[row] = l[r]; }
    }
  }
  BARRIER();
  for (int e = TID; e < rows_here * D; e += CW * RC * 32) {
    const int row = e / D, d = e % D, place = d % DPL * L + d / DPL;
    float highest = HIDDEN, sum = 0.0f, value = 0.0f;
    for (int w = 0; w < CW; w++) highest = larger(highest, all_m[w * ROWS + row]);
    for (int w = 0; w < CW; w++) {
      const float less = pow2(all_m[w * ROWS + row] - highest);
      sum += all_l[w * ROWS + row] * less;
      value += all[(w * ROWS + row) * D + place] * less;
    }
    parts[((out_row + row) * NUM_GX + GX) * D + d] = value;
    if (d == 0) {
      sums[((out_row + row) * NUM_GX + GX) * 2] = highest;
      sums[((out_row + row) * NUM_GX + GX) * 2 + 1] = sum;
    }
  }
"""
)

# parts [B * H * W, runs, D], sums, at, signs, sinks [H] (in powers of two). Grid: B * H * W blocks of D threads.
# W and H from `out`'s rows: q_shape. -> out [B, H, W, D]
MERGE = r"""
  const int width = q_shape[2], num_heads = q_shape[1], runs = parts_shape[1], d = TID;
  const int b = GX / (num_heads * width), head = GX / width % num_heads;
  const int start = at[2 + 2 * b], newest = start + width - 1;
  const int end = RING != 0 && newest >= RING ? RING : newest + 1;
  const int first = RING == 0 && WINDOW != 0 && start >= WINDOW ? start - WINDOW + 1 : 0;
  const int s0 = first / CPS, s1 = (end + CPS - 1) / CPS < runs ? (end + CPS - 1) / CPS : runs;
  SHARED float x[TURBO ? D : 1];
  const DEVICE float* own_sums = sums + long(GX) * runs * 2;
  const DEVICE float* own_parts = parts + long(GX) * runs * D + d;
  float highest = SINKS ? sinks[head] : HIDDEN, value = 0.0f;
  for (int s = s0; s < s1; s++) highest = larger(highest, own_sums[s * 2]);
  float sum = SINKS ? pow2(sinks[head] - highest) : 0.0f;
  for (int s = s0; s < s1; s++) {
    const float less = pow2(own_sums[s * 2] - highest);
    sum += own_sums[s * 2 + 1] * less;
    value += own_parts[long(s) * D] * less;
  }
  value /= sum;
  if (TURBO) {
    for (int s = 1; s < D; s *= 2) {
      x[d] = value;
      BARRIER();
      value = (d & s) != 0 ? x[d ^ s] - value : value + x[d ^ s];
      BARRIER();
    }
    value *= signs[d] * (1.0f / root(float(D)));
  }
  out[long(GX) * D + d] = T(value);
"""
