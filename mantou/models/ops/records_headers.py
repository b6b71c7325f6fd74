"""What CUDA and Metal call the same thing, for the kernels over KV records. Knows no kernel.

T is the type of queries and of stored scales. `tests/unit/emulated.py` says the same in C++.
"""

from __future__ import annotations

CUDA_HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int word;
#define FN __device__ __forceinline__
#define DEVICE
#define PRIVATE
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define BARRIER() __syncthreads()
#define EXCHANGE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define TID int(threadIdx.x)
#define GX int(blockIdx.x)
#define GY int(blockIdx.y)
#define GZ int(blockIdx.z)
#define NUM_GX int(gridDim.x)
FN float pow2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
FN float larger(float a, float b) { return fmaxf(a, b); }
FN float smaller(float a, float b) { return fminf(a, b); }
FN float root(float x) { return sqrtf(x); }
FN float nearest(float x) { return rintf(x); }
FN float size_of(float x) { return fabsf(x); }
FN word bits_of(float x) { return __float_as_uint(x); }
FN float float_of(word w) { return __uint_as_float(w); }
FN word half_bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
FN word half_bits(__half x) { return __half_as_ushort(x); }
FN word half_bits(float x) { return 0; }
FN float half_value(word w, __nv_bfloat16) { return __uint_as_float(w << 16); }
FN float half_value(word w, __half) { return __half2float(__ushort_as_half((unsigned short)w)); }
FN float half_value(word w, float) { return 0.0f; }
FN float byte_value(word w, int i) {  // 2^23 + byte, exact, less 2^23: an integer conversion has a quarter of the rate
  return __uint_as_float(__byte_perm(w, 0x4B000000u, 0x7650 | i)) - 8388608.0f;
}
FN word f16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
FN word f16_pair(float a, float b) { return f16_bits(a) | (f16_bits(b) << 16); }
FN float f16_low(word w) { return __half2float(__ushort_as_half((unsigned short)(w & 0xffffu))); }
FN word f16_minus(word a, word b) {
  __half2 x = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<word*>(&x);
}
FN word bytes_of(word a, word b, int places) { return __byte_perm(a, b, places); }
FN bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
// c [16, 8] += a [16, 16] b [16, 8] in a warp; c2 and c3 are rows 8 and up.
FN void multiply(float& c0, float& c1, float& c2, float& c3, word a0, word a1, word a2, word a3, word b0, word b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN void load2(const word* at, word* w) { uint2 v = *reinterpret_cast<const uint2*>(at); w[0] = v.x; w[1] = v.y; }
FN void load4(const word* at, word* w) {
  uint4 v = *reinterpret_cast<const uint4*>(at); w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
}
"""

METAL_HEADER = r"""
typedef uint word;
#define FN inline
#define DEVICE device
#define PRIVATE thread
#define SHARED threadgroup
#define UNROLL _Pragma("clang loop unroll(full)")
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define EXCHANGE(x, mask) simd_shuffle_xor(x, ushort(mask))
#define TID int(thread_position_in_threadgroup.x)
#define GX int(threadgroup_position_in_grid.x)
#define GY int(threadgroup_position_in_grid.y)
#define GZ int(threadgroup_position_in_grid.z)
#define NUM_GX int(threadgroups_per_grid.x)
FN float pow2(float x) { return metal::exp2(x); }
FN float larger(float a, float b) { return metal::max(a, b); }
FN float smaller(float a, float b) { return metal::min(a, b); }
FN float root(float x) { return metal::sqrt(x); }
FN float nearest(float x) { return metal::rint(x); }
FN float size_of(float x) { return metal::abs(x); }
FN word bits_of(float x) { return as_type<uint>(x); }
FN float float_of(word w) { return as_type<float>(w); }
FN word half_bits(bfloat16_t x) { return as_type<ushort>(x); }
FN word half_bits(half x) { return as_type<ushort>(x); }
FN word half_bits(float x) { return 0; }
FN float half_value(word w, bfloat16_t) { return as_type<float>(w << 16); }
FN float half_value(word w, half) { return float(as_type<half>(ushort(w))); }
FN float half_value(word w, float) { return 0.0f; }
FN float byte_value(word w, int i) { return float((w >> (8 * i)) & 255u); }
FN void load2(const device word* at, thread word* w) {
  uint2 v = *reinterpret_cast<const device uint2*>(at); w[0] = v.x; w[1] = v.y;
}
FN void load4(const device word* at, thread word* w) {
  uint4 v = *reinterpret_cast<const device uint4*>(at); w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
}
"""

# MLX gives a Metal kernel only those attributes whose names stand in its body.
METAL_ATTRIBUTES = "// thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid\n"
