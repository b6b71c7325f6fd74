// Affine-quantised keys and values: MLX's packing, written and read 16 lanes at a time. Included once per instruction
// set. The bits are those of mx.quantize and mx.dequantize, so that packed rows travel between all implementations.

// Values d .. d + 15 of row j; d is a multiple of 16, so they share a group.
MANTOU_INLINE Vf load_packed(const void* rows, int64_t row_bytes, const Groups& g, Scalar type, int64_t j, int d) {
  const auto* row = static_cast<const uint8_t*>(rows) + j * row_bytes;
  const Vf q = g.bits == 8 ? load_u8(row + d) : load_u4(row + d / 2);
  const size_t at = static_cast<size_t>(j * g.stride + d / g.size);
  const float scale = to_float(g.scales, at, type), bias = to_float(g.biases, at, type);
  return rounded(add(rounded(mul(q, set1(scale)), type), set1(bias)), type);
}

static void unpack_row(const void* row, const Groups& g, Scalar type, int n, float* x) {
  for (int d = 0; d < n; d += kLanes) store(x + d, load_packed(row, 0, g, type, 0, d));
}

static void quantise_row(const float* x, int n, int bits, int group, Scalar type, uint8_t* bytes, void* scales,
                         void* biases) {
  const float bins = static_cast<float>((1 << bits) - 1);
  for (int g = 0; g < n / group; ++g, x += group) {
    float lowest = INFINITY, highest = -INFINITY;
    for (int i = 0; i < group; ++i) {
      highest = highest < x[i] ? x[i] : highest;
      lowest = x[i] < lowest ? x[i] : lowest;
    }
    const bool negative = __builtin_fabsf(lowest) > __builtin_fabsf(highest);
    float scale = (highest - lowest) / bins;
    scale = scale < 1e-7f ? 1e-7f : scale;
    scale = negative ? scale : -scale;
    const float edge = negative ? lowest : highest, steps = __builtin_rintf(edge / scale);
    float bias = 0;
    if (steps != 0) scale = edge / steps, bias = edge;
    uint8_t q[128];
    for (int i = 0; i < group; ++i) {
      float v = __builtin_rintf((x[i] - bias) / scale);
      v = v < 0.0f ? 0.0f : v;
      q[i] = static_cast<uint8_t>(static_cast<int32_t>(bins < v ? bins : v));
    }
    if (bits == 8) {
      std::memcpy(bytes, q, static_cast<size_t>(group));
    } else {
      for (int i = 0; i < group / 2; ++i) bytes[i] = static_cast<uint8_t>(q[2 * i] | q[2 * i + 1] << 4);
    }
    bytes += group * bits / 8;
    store_row(&scale, 1, type, scales, static_cast<size_t>(g));
    store_row(&bias, 1, type, biases, static_cast<size_t>(g));
  }
}
