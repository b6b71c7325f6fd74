// The kernels for AVX2; the build gives this file its compiler flags.
#define MANTOU_ISA avx2
#define MANTOU_ISA_NAME "avx2"
#define MANTOU_TABLE kernels_avx2
#include "isa.inl"
