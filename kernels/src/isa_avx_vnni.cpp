// The kernels for AVX2 with AVX-VNNI (processors without AVX-512); the build gives this file its compiler flags.
#define MANTOU_ISA avx_vnni
#define MANTOU_ISA_NAME "avx_vnni"
#define MANTOU_TABLE kernels_avx_vnni
#include "isa.inl"
