// The kernels for NEON; the build gives this file its compiler flags.
#define MANTOU_ISA neon
#define MANTOU_ISA_NAME "neon"
#define MANTOU_TABLE kernels_neon
#include "isa.inl"
