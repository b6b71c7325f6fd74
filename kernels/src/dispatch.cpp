// Which kernel table this CPU can run. The checks name every extension that the table's compiler flags allow.
#include <cstring>

#include "amx.h"
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace mantou {

#if defined(__x86_64__)
extern const Kernels kernels_avx512, kernels_avx_vnni, kernels_avx2;
#if defined(MANTOU_AMX)
extern const Kernels kernels_amx;
#endif
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
#if defined(MANTOU_AMX)
  if (avx512 && wanted("amx") && amx_works()) return &kernels_amx;
#endif
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

std::vector<const char*> runnable_kernels() {
  std::vector<const char*> found;
  for (const char* name : {"amx", "avx512", "avx_vnni", "avx2", "neon"})
    if (kernels_for_cpu(name) != nullptr) found.push_back(name);
  return found;
}

}  // namespace mantou
