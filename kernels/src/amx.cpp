// The probe for AMX: a child process that may die of it, then the system's permission for this one.
#include "amx.h"

#if defined(MANTOU_AMX)

#include <cpuid.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mantou {

bool amx_gives_right_products();  // of the instruction set's file

namespace {

bool announced() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  return (d & kTile) != 0 && (d & kInt8) != 0;
}

// Tile registers are large, so Linux gives a process room for them only on demand: for all its threads, from now on.
bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Runs in the child, which has one thread and must not run anything that the parent registered.
[[noreturn]] void try_it() {
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  for (int signal_number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) signal(signal_number, SIG_DFL);
  alarm(5);
  if (!permitted()) _exit(2);
  _exit(amx_gives_right_products() ? 0 : 1);
}

std::string probe() {
  if (!announced()) return "absent";
  const pid_t child = fork();
  if (child < 0) return std::string("no process for its probe: ") + std::strerror(errno);
  if (child == 0) try_it();
  int status = 0;
  pid_t ended;
  while ((ended = waitpid(child, &status, 0)) < 0 && errno == EINTR) {}
  if (ended < 0) return std::string("the end of its probe was not seen: ") + std::strerror(errno);
  if (WIFSIGNALED(status)) return "its probe was ended by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) == 2) return "the system does not permit it";
  if (WEXITSTATUS(status) != 0) return "its probe gave wrong products";
  if (!permitted()) return std::string("the system does not permit it to this process: ") + std::strerror(errno);
  return "works";
}

}  // namespace

const std::string& amx_state() {
  static const std::string state = probe();
  return state;
}

}  // namespace mantou

#else

namespace mantou {

const std::string& amx_state() {
  static const std::string state = "absent";
  return state;
}

}  // namespace mantou

#endif
