// Threads that share a job's items. Knows no arithmetic.
//
// The calling thread always works too and never waits for a thread to wake: a job is done when its items are done,
// whoever did them. So a helper that the system has descheduled (a shared machine) costs at most the chunk it holds.
// Results cannot depend on the number of threads, because an item is computed whole by one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mantou {

// CPUs this process may use: the affinity mask, cut by the cgroup quota (v2 or v1), at least 1.
int usable_cpus();

class Pool {
 public:
  static Pool& instance();  // lives until the process ends: joining threads at exit may hang an interpreter

  int threads() const { return num_threads_; }
  void resize(int num_threads);

  // Calls f(begin, end) until [0, items) is covered, in chunks of at most `chunk` items that any thread takes.
  // cost_us is a guess of the serial time; work too small to share runs on the caller alone. f must not throw.
  template <class F>
  void run(int items, int chunk, double cost_us, F&& f) {
    if (items <= 0) return;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (num_threads_ == 1 || cost_us < kMinSharedUs || items <= chunk || !lock.owns_lock() || core_is_taken()) {
      f(0, items);  // also when another stream's thread holds the pool: its helpers are busy anyway
      return;
    }
    if (too_early(cost_us)) {
      f(0, items);
      early_job_done();
      return;
    }
    share(items, chunk, cost_us * chunk / items,
          [](void* body, int begin, int end) { (*static_cast<std::remove_reference_t<F>*>(body))(begin, end); }, &f);
  }

  // Bytes that the next jobs read: helpers ask memory for them while they have nothing to do. A hint; it may be ignored.
  void warm(const void* data, size_t bytes) {
    warm_end_.store(static_cast<const char*>(data) + bytes, std::memory_order_relaxed);
    warm_left_.store(static_cast<ptrdiff_t>(bytes), std::memory_order_relaxed);
  }

 private:
  using Body = void (*)(void*, int, int);
  static constexpr double kMinSharedUs = 4.0;

  void share(int items, int chunk, double chunk_us, Body body, void* context);
  void take_chunks(uint32_t epoch);
  int in_lanes(int n, int chunks) const;
  void wait_for_helpers(double chunk_us);
  bool core_is_taken();
  bool too_early(double cost_us);
  void early_job_done();
  void help();
  bool wait_for_job(uint32_t seen);
  bool warm_a_little();

  int num_threads_ = 1;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;  // one job at a time; also guards the five below
  double burst_start_us_ = 0, last_job_us_ = 0;
  double alone_until_us_ = 0;  // the system gave a helper's core to others: until then the caller works alone
  double last_stall_us_ = 0, alone_for_us_ = 0;

  // Epoch in the high half, next free chunk in the low half: one word, so that a helper which wakes late cannot take
  // an item of a later job with the fields of an earlier one.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> items_{0}, chunk_{1};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false}, stop_{false};
  alignas(64) std::atomic<const char*> warm_end_{nullptr};
  std::atomic<ptrdiff_t> warm_left_{0};  // a helper may lower it late: what it then fetches is still no more than asked
};

// Who does the items of a job: the pool's threads, or the calling thread alone, which may be inside a job itself.
enum class Hands { pool, own };

template <class F>
void run_with(Hands hands, int items, int chunk, double cost_us, F&& f) {
  hands == Hands::own ? f(0, items) : Pool::instance().run(items, chunk, cost_us, std::forward<F>(f));
}

}  // namespace mantou
