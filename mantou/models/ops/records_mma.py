"""Attention over KV records on tensor cores: CUDA only, 16-bit models. Knows no arrays. See `records_source`.

A warp takes 16 columns a step and 16 query rows (8 where that is all). Codes become 16-bit floats less their middle
value, exactly: two bytes and the exponent of 1024 side by side. With fragment lane g = lane / 4, t = lane % 4:

    scores [rows, columns] = q [rows, dims] . codes^T    a lane holds columns 8n + g, a quarter of the dims
    out    [rows, dims]    = p [rows, columns] . codes   a lane holds columns 8n + 2t, 8n + 2t + 1, an eighth of them

Dims may stand in any order as long as both sides agree, so lanes load them as they lie. Scales stay outside: those of
keys after the product, those of values in p, as fractions of the greatest scale so far.
"""

from __future__ import annotations

# Arguments and grid as ATTEND; chunks of MR rows. RH = MR / 8.
ATTEND_MMA = r"""
  constexpr int KEY_WORDS = D * KB / 32, VALUE_WORDS = D * VB / 32, KEY_PAIRS = KEY_WORDS + VALUE_WORDS;
  constexpr int NG = D / GS, KN = GS / 4, KW = KN * KB >= 32 ? KN * KB / 32 : 1, STEPS = KN / 4;
  constexpr int VGS = BOOK ? D : GS, NV = D / VGS, VN = VGS / 8, VW = VN * VB > 64 ? VN * VB / 32 : 2;
  constexpr int NUM_PAIRS = NG + NV, RH = MR / 8;
  constexpr int EACH = VB == 4 && !BOOK && VN == 4 ? 2 : 4;  // values from a word of bytes
  constexpr float KEY_MIDDLE = float(1 << (KB - 1)), VALUE_MIDDLE = BOOK ? 0.0f : float(1 << (VB - 1));
  const word EXPONENT = 0x64646464u;
  const word key_middle = f16_pair(1024.0f + KEY_MIDDLE, 1024.0f + KEY_MIDDLE);
  const word value_middle = f16_pair(1024.0f + VALUE_MIDDLE, 1024.0f + VALUE_MIDDLE);
  const int lane = TID % 32, warp = TID / 32, g = lane / 4, t = lane % 4;
  const int width = q_shape[2], heads = kv_shape[1], rows = q_shape[1] / heads * width;
  const int head = GY % heads, first_row = GY / heads * MR, b = GZ;
  const int rows_here = rows - first_row < MR ? rows - first_row : MR;
  const int start = at[2 + 2 * b], newest = start + width - 1;
  const int end = RING != 0 && newest >= RING ? RING : newest + 1;
  const int first = RING == 0 && WINDOW != 0 && start >= WINDOW ? start - WINDOW + 1 : 0;
  const int c1 = GX * CPS + CPS < end ? GX * CPS + CPS : end;
  const int c0 = GX * CPS > first ? GX * CPS : first;
  if (c0 >= c1) return;
  SHARED float all[CW * MR * D];
  SHARED float all_m[CW * MR];
  SHARED float all_l[CW * MR];

  // Queries: rotated if keys are, then this lane's dims as 16-bit floats of at most 1.
  for (int r = warp; r < MR; r += CW) {
    constexpr int N = D / 32;
    float x[N];
    UNROLL for (int i = 0; i < N; i++) {
      x[i] = r < rows_here ? float(q[(long(b * heads + head) * rows + first_row + r) * D + lane * N + i]) : 0.0f;
    }
    if (TURBO) {
      UNROLL for (int i = 0; i < N; i++) x[i] *= signs[lane * N + i] * (1.0f / root(float(D)));
      hadamard<D, N>(x, lane);
    }
    UNROLL for (int i = 0; i < N; i++) all[r * D + lane * N + i] = x[i];
  }
  BARRIER();
  word q_[NG][STEPS][RH][2];
  float q_sum[NG][RH], q_scale[RH];
  UNROLL for (int h = 0; h < RH; h++) {
    const DEVICE float* own = all + (g + 8 * h) * D;
    float most = 1e-30f;
    for (int d = t * (D / 4); d < (t + 1) * (D / 4); d++) most = larger(most, size_of(own[d]));
    most = larger(most, EXCHANGE(most, 1));
    most = larger(most, EXCHANGE(most, 2));
    const float less = 1.0f / most;
    q_scale[h] = most * consts[0];
    UNROLL for (int n = 0; n < NG; n++) {
      float sum = 0.0f;
      UNROLL for (int i = 0; i < STEPS; i++) {
        // The order in which values_of a step's word stand: 4 bytes, or every other of 8 half bytes.
        const int from = n * GS + t * KN + (KB == 8 ? 4 * i : 8 * (i / 2) + i % 2);
        const int step = KB == 8 ? 1 : 2;
        UNROLL for (int e = 0; e < 2; e++) {
          const word pair = f16_pair(own[from + 2 * e * step] * less, own[from + (2 * e + 1) * step] * less);
          q_[n][i][h][e] = pair;
          sum += f16_low(pair) + f16_low(pair >> 16);
        }
      }
      sum += EXCHANGE(sum, 1);
      sum += EXCHANGE(sum, 2);
      q_sum[n][h] = sum;
    }
  }
  BARRIER();
  word high_a = 0, high_b = 0, low_a = 0, low_b = 0;  // bytes of the levels as 16-bit floats
  if (BOOK) {
    UNROLL for (int i = 0; i < 4; i++) {
      const word one = f16_bits(consts[1 + i]), two = f16_bits(consts[5 + i]);
      low_a |= (one & 255u) << (8 * i);
      high_a |= (one >> 8) << (8 * i);
      low_b |= (two & 255u) << (8 * i);
      high_b |= (two >> 8) << (8 * i);
    }
  }

  float m[RH], l[RH], bias[NV][RH], most_scale[NV], acc[NV][VN][2 * RH];
  UNROLL for (int h = 0; h < RH; h++) { m[h] = HIDDEN; l[h] = 0.0f; }
  UNROLL for (int n = 0; n < NV; n++) {
    most_scale[n] = 1e-30f;
    UNROLL for (int h = 0; h < RH; h++) bias[n][h] = 0.0f;
    UNROLL for (int i = 0; i < VN; i++) {
      UNROLL for (int e = 0; e < 2 * RH; e++) acc[n][i][e] = 0.0f;
    }
  }
  const DEVICE word* records = kv + (long(at[1 + 2 * b]) * heads + head) * kv_shape[2] * REC;
  for (int c = c0 + warp * 16; c < c1; c += CW * 16) {
    word kw[2][NG][KW], vw[4][NV][VW], pairs[4][(NUM_PAIRS + 3) / 4 * 4];
    UNROLL for (int n = 0; n < 2; n++) {
      const int column = c + 8 * n + g < c1 ? c + 8 * n + g : c1 - 1;
      const DEVICE word* record = records + long(column) * REC;
      UNROLL for (int i = 0; i < NG; i++) load_codes<KB, KN>(record + i * (GS * KB / 32), t, kw[n][i]);
    }
    UNROLL for (int j = 0; j < 4; j++) {
      const int mine = c + 8 * (j / 2) + 2 * t + j % 2, column = mine < c1 ? mine : c1 - 1;
      const DEVICE word* record = records + long(column) * REC;
      UNROLL for (int i = 0; i < NV; i++) {
        load_codes<VB, VN>(record + KEY_WORDS + i * (VGS * VB / 32), g, vw[j][i]);
      }
      if (KEY_PAIRS % 4 == 0) {
        UNROLL for (int i = 0; i < NUM_PAIRS; i += 4) load4(record + KEY_PAIRS + i, pairs[j] + i);
      } else {
        UNROLL for (int i = 0; i < NUM_PAIRS; i++) pairs[j][i] = record[KEY_PAIRS + i];
      }
    }

    float score[4][RH];
    UNROLL for (int n = 0; n < 2; n++) {
      UNROLL for (int e = 0; e < 2; e++) {
        UNROLL for (int h = 0; h < RH; h++) score[2 * n + e][h] = 0.0f;
      }
      UNROLL for (int i = 0; i < NG; i++) {
        float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (int s = 0; s < STEPS; s++) {
          const word four = KB == 8 ? kw[n][i][s] : (kw[n][i][s / 2] >> (4 * (s % 2))) & 0x0f0f0f0fu;
          const word b0 = f16_minus(bytes_of(four, EXPONENT, 0x4140), key_middle);
          const word b1 = f16_minus(bytes_of(four, EXPONENT, 0x4342), key_middle);
          multiply(dot[0], dot[1], dot[2], dot[3], q_[i][s][0][0], RH == 2 ? q_[i][s][RH - 1][0] : 0u,
                   q_[i][s][0][1], RH == 2 ? q_[i][s][RH - 1][1] : 0u, b0, b1);
        }
        UNROLL for (int e = 0; e < 2; e++) {
          const word pair = pairs[2 * n + e][i];
          const float scale = half_value(pair & 0xffffu, T());
          const float middle = half_value(pair >> 16, T()) + KEY_MIDDLE * scale;
          UNROLL for (int h = 0; h < RH; h++) score[2 * n + e][h] += scale * dot[2 * h + e] + middle * q_sum[i][h];
        }
      }
    }
    float highest[RH];
    bool higher = false;
    UNROLL for (int h = 0; h < RH; h++) {
      highest[h] = m[h];
      UNROLL for (int j = 0; j < 4; j++) {
        const int column = c + 8 * (j / 2) + 2 * t + j % 2;
        int held = column;
        if (RING != 0) {
          const int back = (newest - column) % (RING != 0 ? RING : 1);
          held = newest - (back < 0 ? back + RING : back);
        }
        const int query = start + (first_row + g + 8 * h) % width;
        const bool seen = column < c1 && held >= 0 && held <= query && (WINDOW == 0 || held > query - WINDOW);
        score[j][h] = seen ? score[j][h] * q_scale[h] : HIDDEN;
        highest[h] = larger(highest[h], score[j][h]);
      }
      highest[h] = larger(highest[h], EXCHANGE(highest[h], 1));
      highest[h] = larger(highest[h], EXCHANGE(highest[h], 2));
      higher = higher || highest[h] > m[h];
    }
    if (any_lane(higher)) {
      UNROLL for (int h = 0; h < RH; h++) {
        const float less = pow2(m[h] - highest[h]);
        m[h] = highest[h];
        l[h] *= less;
        UNROLL for (int n = 0; n < NV; n++) {
          bias[n][h] *= less;
          UNROLL for (int i = 0; i < VN; i++) {
            acc[n][i][2 * h] *= less;
            acc[n][i][2 * h + 1] *= less;
          }
        }
      }
    }
    UNROLL for (int h = 0; h < RH; h++) {
      UNROLL for (int j = 0; j < 4; j++) {
        score[j][h] = score[j][h] > 0.5f * HIDDEN ? pow2(score[j][h] - m[h]) : 0.0f;
        l[h] += score[j][h];
      }
    }
    UNROLL for (int n = 0; n < NV; n++) {
      float scale[4], most = 0.0f;
      UNROLL for (int j = 0; j < 4; j++) {
        const word pair = pairs[j][NG + n];
        scale[j] = BOOK ? float_of(pair) : half_value(pair & 0xffffu, T());
        const float middle = BOOK ? 0.0f : half_value(pair >> 16, T()) + VALUE_MIDDLE * scale[j];
        UNROLL for (int h = 0; h < RH; h++) bias[n][h] += score[j][h] * middle;
        most = larger(most, size_of(scale[j]));
      }
      most = larger(most, EXCHANGE(most, 1));
      most = larger(most, EXCHANGE(most, 2));
      if (most > most_scale[n]) {  // the same for all lanes
        const float less = most_scale[n] / (2.0f * most);
        most_scale[n] = 2.0f * most;
        UNROLL for (int i = 0; i < VN; i++) {
          UNROLL for (int e = 0; e < 2 * RH; e++) acc[n][i][e] *= less;
        }
      }
      const float inverse = 1.0f / most_scale[n];
      word p[RH][2];
      UNROLL for (int h = 0; h < RH; h++) {
        UNROLL for (int k = 0; k < 2; k++) {
          const float even = score[2 * k][h] * scale[2 * k], odd = score[2 * k + 1][h] * scale[2 * k + 1];
          p[h][k] = f16_pair(even * inverse, odd * inverse);
        }
      }
      UNROLL for (int u = 0; u < VN / EACH; u++) {
        word b_[4][2];
        UNROLL for (int k = 0; k < 2; k++) {
          if (BOOK) {
            word twos[2][2];
            UNROLL for (int e = 0; e < 2; e++) {
              word places = 0;
              UNROLL for (int i = 0; i < 4; i++) places |= word(code<VB>(vw[2 * k + e][n], 4 * u + i)) << (4 * i);
              const word high = bytes_of(high_a, high_b, places), low = bytes_of(low_a, low_b, places);
              twos[e][0] = bytes_of(low, high, 0x5140);
              twos[e][1] = bytes_of(low, high, 0x7362);
            }
            UNROLL for (int i = 0; i < 2; i++) {
              b_[2 * i][k] = bytes_of(twos[0][i], twos[1][i], 0x5410);
              b_[2 * i + 1][k] = bytes_of(twos[0][i], twos[1][i], 0x7632);
            }
          } else {
            const word x = VB == 8 ? vw[2 * k][n][u] : (vw[2 * k][n][u / 2] >> (4 * (u % 2))) & 0x0f0f0f0fu;
            const word y = VB == 8 ? vw[2 * k + 1][n][u]
                                   : (vw[2 * k + 1][n][u / 2] >> (4 * (u % 2))) & 0x0f0f0f0fu;
            const word front = bytes_of(x, y, 0x5140), back = bytes_of(x, y, 0x7362);
            b_[0][k] = f16_minus(bytes_of(front, EXPONENT, 0x4140), value_middle);
            b_[1][k] = f16_minus(bytes_of(front, EXPONENT, 0x4342), value_middle);
            b_[2][k] = f16_minus(bytes_of(back, EXPONENT, 0x4140), value_middle);
            b_[3][k] = f16_minus(bytes_of(back, EXPONENT, 0x4342), value_middle);
          }
        }
        UNROLL for (int i = 0; i < EACH; i++) {
          float rest2 = 0.0f, rest3 = 0.0f;
          const int at_ = EACH * u + i;
          if (RH == 2) {
            multiply(acc[n][at_][0], acc[n][at_][1], acc[n][at_][2 * RH - 2], acc[n][at_][2 * RH - 1],
                     p[0][0], p[RH - 1][0], p[0][1], p[RH - 1][1], b_[i][0], b_[i][1]);
          } else {
            multiply(acc[n][at_][0], acc[n][at_][1], rest2, rest3, p[0][0], 0u, p[0][1], 0u, b_[i][0], b_[i][1]);
          }
        }
      }
    }
  }

  UNROLL for (int h = 0; h < RH; h++) {
    const int row = warp * MR + g + 8 * h;
    l[h] += EXCHANGE(l[h], 1);
    l[h] += EXCHANGE(l[h], 2);
    if (t == 0) { all_m[row] = m[h]; all_l[row] = l[h]; }
    UNROLL for (int n = 0; n < NV; n++) {
      bias[n][h] += EXCHANGE(bias[n][h], 1);
      bias[n][h] += EXCHANGE(bias[n][h], 2);
      UNROLL for (int i = 0; i < VN; i++) {
        // Value i of a lane's part, in the order of the products above.
        const int place = BOOK || VB == 8 ? i : VN == 4 ? 2 * (i % 2) + i / 2 : 8 * (i / 8) + i / 4 % 2 + 2 * (i % 4);
        UNROLL for (int e = 0; e < 2; e++) {
          all[row * D + n * VGS + (2 * t + e) * VN + place] = acc[n][i][2 * h + e] * most_scale[n] + bias[n][h];
        }
      }
    }
  }
  BARRIER();
  const long out_row = long(b * heads + head) * rows + first_row;
  for (int e = TID; e < rows_here * D; e += CW * 32) {
    const int row = e / D, d = e % D;
    float highest = HIDDEN, sum = 0.0f, value = 0.0f;
    UNROLL for (int w = 0; w < CW; w++) highest = larger(highest, all_m[w * MR + row]);
    UNROLL for (int w = 0; w < CW; w++) {
      const float less = pow2(all_m[w * MR + row] - highest);
      sum += all_l[w * MR + row] * less;
      value += all[(w * MR + row) * D + d] * less;
    }
    parts[((out_row + row) * NUM_GX + GX) * D + d] = value;
    if (d == 0) {
      sums[((out_row + row) * NUM_GX + GX) * 2] = highest;
      sums[((out_row + row) * NUM_GX + GX) * 2 + 1] = sum;
    }
  }
"""
