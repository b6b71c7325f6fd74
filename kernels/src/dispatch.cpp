// Which kernel table this CPU can run. The checks name every extension that the table's compiler flags allow.
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace mantou {

#if defined(__x86_64__)
extern const Kernels kernels_avx512, kernels_avx_vnni, kernels_avx2;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

const Kernels* kernels_for_cpu(const char* name) {
  const auto wanted = [name](const char* n) { return name == nullptr || std::strcmp(name, n) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512 && wanted("avx512")) return &kernels_avx512;
  if (avx2 && __builtin_cpu_supports("avxvnni") && wanted("avx_vnni")) return &kernels_avx_vnni;
  if (avx2 && wanted("avx2")) return &kernels_avx2;
#elif defined(__aarch64__)
#if defined(__linux__)
  const bool dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  const bool dot = true;
#endif
  if (dot && wanted("neon")) return &kernels_neon;
#endif
  return nullptr;
}

size_t tile_bytes(const Layout& l, int tokens) {
  const size_t t = l.form == Form::dense ? (tokens + 11) / 12 * 12 : tokens;  // micro-tiles of 6 or 12 (dense.inl)
  return l.form == Form::dense ? l.k_padded * t * 4 : static_cast<size_t>(l.k / kUnit) * t * (64 + 8);
}

size_t attend_scratch_floats(int num_queries, int head_dim, int num_keys) {
  const auto padded = [](int n) { return static_cast<size_t>((n + 15) / 16 * 16); };
  return padded(head_dim) * 16 + static_cast<size_t>(num_queries) * (padded(num_keys) + 16);
}

}  // namespace mantou
