// The kernels for AVX512; the build gives this file its compiler flags.
#define MANTOU_ISA avx512
#define MANTOU_ISA_NAME "avx512"
#define MANTOU_TABLE kernels_avx512
#include "isa.inl"
