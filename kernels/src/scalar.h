// The three float types a tensor may have, and their scalar conversions. Knows no vector code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mantou {

enum class Scalar : uint8_t { f32, bf16, f16 };

constexpr size_t size_of(Scalar s) { return s == Scalar::f32 ? 4 : 2; }

static inline float bf16_to_float(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline float f16_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u, u;
  float f;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  u = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
  std::memcpy(&f, &u, 4);
  return f;
}

static inline float to_float(const void* p, size_t i, Scalar s) {
  if (s == Scalar::f32) {
    float f;
    std::memcpy(&f, static_cast<const uint8_t*>(p) + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, static_cast<const uint8_t*>(p) + 2 * i, 2);
  return s == Scalar::bf16 ? bf16_to_float(h) : f16_to_float(h);
}

}  // namespace mantou
