// The thread pool: chunks from one ticket word, short adaptive spins, then a futex.
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mantou {
namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// quota / period in CPUs, or a large number when the group has no limit or the file is absent.
double cgroup_cpus() {
  constexpr double kUnlimited = 1e9;
  std::string quota;
  double period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period)
    return quota == "max" || period <= 0 ? kUnlimited : std::atof(quota.c_str()) / period;
  double quota_us = -1;
  std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (q >> quota_us && p >> period && quota_us > 0 && period > 0) return quota_us / period;
  return kUnlimited;
}

// Longest spin of a helper that has just worked. Jobs of one forward are 10-200 us apart; between tokens the host
// needs a millisecond or more, and there a sleeping helper is right.
constexpr double kLongSpinUs = 200, kShortSpinUs = 10;
// A pause between two looks at the clock that can only mean that the system ran somebody else on this core.
constexpr double kDescheduledUs = 300;
// A helper's last chunk may take that many times what its guessed cost says before it counts as such a pause.
constexpr double kGuess = 4;
// How long the caller works alone after it had to wait that long for a helper.
constexpr double kFirstRetryUs = 5e3, kLastRetryUs = 160e3;
// A step begins while the thread that launches it still runs. With no core to spare, a helper woken then queues behind
// one of the two and may miss the whole step; woken when the launch is over, it finds a free core.
constexpr double kLaunchUs = 120, kStepGapUs = 100;
constexpr int kFewThreads = 4;
constexpr uint32_t kClosed = 0xffffffffu;  // of a ticket: no items to take

}  // namespace

int usable_cpus() {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                        : static_cast<int>(std::thread::hardware_concurrency());
  // A quota of 1.5 CPUs must not become 2 threads: the group would be throttled in every period.
  return std::max(1, static_cast<int>(std::min<double>(n, std::floor(cgroup_cpus()))));
}

Pool& Pool::instance() {
  static Pool* pool = [] {
    auto* p = new Pool;
    p->resize(usable_cpus());
    return p;
  }();
  return *pool;
}

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_threads = std::clamp(num_threads, 1, 256);
  if (num_threads == num_threads_) return;
  stop_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& t : helpers_) t.join();
  helpers_.clear();
  stop_ = false;
  num_threads_ = num_threads;
  for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
}

void Pool::share(int items, int chunk, double chunk_us, Body body, void* context) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  // Close the old ticket before its fields change: a late helper that reads a new field must fail its exchange, or it
  // would take an item that the old job never had. The fences pair with the one in take_chunks.
  ticket_.store(static_cast<uint64_t>(epoch) << 32 | kClosed, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  items_.store(items, std::memory_order_relaxed);
  chunk_.store(std::max(1, chunk), std::memory_order_relaxed);
  unfinished_.store(items, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
  take_chunks(epoch);
  wait_for_helpers(chunk_us);
}

// The chunk that is taken as the n-th: threads that take turns each go through neighbours, and what one fetches ahead is
// what it needs next.
int Pool::in_lanes(int n, int chunks) const {
  const int lane = n % num_threads_, rest = chunks % num_threads_;
  return lane * (chunks / num_threads_) + std::min(lane, rest) + n / num_threads_;
}

void Pool::take_chunks(uint32_t epoch) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(ticket >> 32) == epoch) {
    if (static_cast<uint32_t>(ticket) == kClosed) return;
    const int next = static_cast<int>(static_cast<uint32_t>(ticket));
    const int items = items_.load(std::memory_order_relaxed), chunk = chunk_.load(std::memory_order_relaxed);
    const int chunks = (items + chunk - 1) / chunk;
    if (next >= chunks) return;
    const int begin = in_lanes(next, chunks) * chunk, end = items - begin < chunk ? items : begin + chunk;
    const Body body = body_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t taken = (ticket & ~uint64_t{0xffffffffu}) | static_cast<uint32_t>(next + 1);
    if (!ticket_.compare_exchange_weak(ticket, taken, std::memory_order_acq_rel)) continue;
    body(context, begin, end);
    const int count = end - begin;
    if (unfinished_.fetch_sub(count, std::memory_order_acq_rel) == count &&
        caller_sleeps_.load(std::memory_order_seq_cst))
      unfinished_.notify_all();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

// The caller waits only for chunks in progress. A helper that runs needs microseconds; one that was descheduled
// inside a chunk may sit on this very core's queue, so yield, and then sleep rather than burn its time.
void Pool::wait_for_helpers(double chunk_us) {
  for (int i = 0; i < 500; ++i) {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    pause();
  }
  const double start = now_us();
  for (int i = 0; unfinished_.load(std::memory_order_acquire) != 0; ++i) {
    if (i < 8) {
      std::this_thread::yield();
      continue;
    }
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    for (int left; (left = unfinished_.load(std::memory_order_seq_cst)) != 0;) unfinished_.wait(left);
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }
  const double now = now_us();
  if (now - start < kDescheduledUs + kGuess * chunk_us) return;
  // Stalls that come back soon mean that another program keeps the core: try it again at growing intervals.
  alone_for_us_ = now - last_stall_us_ < 2 * alone_for_us_ + kFirstRetryUs ? std::min(2 * alone_for_us_, kLastRetryUs)
                                                                            : kFirstRetryUs;
  alone_for_us_ = std::max(alone_for_us_, kFirstRetryUs);
  last_stall_us_ = now;
  alone_until_us_ = now + alone_for_us_;
}

bool Pool::core_is_taken() {
  if (alone_until_us_ == 0) return false;
  if (now_us() < alone_until_us_) return true;
  alone_until_us_ = 0;
  return false;
}

bool Pool::too_early(double cost_us) {
  if (num_threads_ > kFewThreads || sleepers_.load(std::memory_order_relaxed) == 0) return false;
  const double now = now_us();
  if (now - last_job_us_ > kStepGapUs) burst_start_us_ = now;
  last_job_us_ = now + cost_us;
  return now - burst_start_us_ < kLaunchUs && cost_us < kLaunchUs;
}

// A job that took longer than guessed is no pause after which a step begins anew.
void Pool::early_job_done() { last_job_us_ = now_us(); }

void Pool::help() {
  uint32_t seen = epoch_.load(std::memory_order_acquire);
  while (wait_for_job(seen)) {
    seen = epoch_.load(std::memory_order_acquire);
    take_chunks(seen);
  }
}

// Fetches four lines of what `warm` named into this core's cache. Two helpers may fetch the same lines; no harm.
bool Pool::warm_a_little() {
  const ptrdiff_t left = warm_left_.load(std::memory_order_relaxed);
  if (left <= 0) return false;
  warm_left_.store(left - 256, std::memory_order_relaxed);
  const char* from = warm_end_.load(std::memory_order_relaxed) - left;
  for (int i = 0; i < 256; i += 64) __builtin_prefetch(from + i);
  return true;
}

// Returns false when the pool stops. Spins as long as the last spins paid off, a little otherwise; a helper that
// finds itself descheduled while spinning gives its core away at once, since it only takes turns with other work.
bool Pool::wait_for_job(uint32_t seen) {
  static thread_local double budget_us = kLongSpinUs;
  const double start = now_us();
  double last = start;
  const auto idle = [&] { return epoch_.load(std::memory_order_seq_cst) == seen && !stop_.load(std::memory_order_seq_cst); };
  for (int i = 1; idle(); ++i) {
    if (!warm_a_little()) pause();
    if (i % 64 != 0) continue;
    const double now = now_us();
    const bool descheduled = now - last > kDescheduledUs;
    last = now;
    if (!descheduled && now - start < budget_us) continue;
    budget_us = descheduled ? kShortSpinUs : std::max(kShortSpinUs, budget_us * 0.7);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (idle()) epoch_.wait(seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !stop_.load(std::memory_order_acquire);
  }
  budget_us = std::min(kLongSpinUs, budget_us * 1.3 + 1.0);
  return !stop_.load(std::memory_order_acquire);
}

}  // namespace mantou
