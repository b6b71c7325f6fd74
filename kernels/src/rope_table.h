// Cosines and sines of rotary positions, computed once per block of positions. Knows no MLX.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace mantou {

// The angle is float32(float32(position * scale) * frequency), as plain MLX forms it: at position 8000 an angle from
// doubles would already differ in the fourth digit of its sine.
class RopeTable {
 public:
  RopeTable(std::vector<float> frequencies, float scale)
      : frequencies_(std::move(frequencies)), scale_(scale), blocks_(new std::atomic<float*>[kBlocks]()) {}
  RopeTable(RopeTable&&) = delete;
  ~RopeTable() {
    for (int i = 0; i < kBlocks; ++i) delete[] blocks_[i].load();
  }

  // One table per (frequencies, scale) in the process. Few models are loaded at once, but dynamic scaling makes new
  // frequencies for every length: the least recently used of 32 is dropped.
  static std::shared_ptr<RopeTable> shared(std::vector<float> frequencies, float scale);

  static std::vector<float> from_periods(const float* periods, int half);

  // half cosines, then half sines. Positions outside the table are computed into `spare` (room for 2 * half).
  const float* angles(int64_t position, float* spare) {
    const int64_t block = position / kBlock;
    if (position < 0 || block >= kBlocks) {
      compute(position, spare);
      return spare;
    }
    float* data = blocks_[block].load(std::memory_order_acquire);
    if (data == nullptr) data = make_block(static_cast<int>(block));
    return data + position % kBlock * (2 * frequencies_.size());
  }

 private:
  static constexpr int kBlock = 64, kBlocks = 1 << 12;  // 262144 positions

  void compute(int64_t position, float* out) const {
    const size_t half = frequencies_.size();
    const float scaled = static_cast<float>(position) * scale_;
    for (size_t i = 0; i < half; ++i) {
      const float angle = scaled * frequencies_[i];
      out[i] = std::cos(angle);
      out[half + i] = std::sin(angle);
    }
  }

  float* make_block(int block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (float* made = blocks_[block].load(std::memory_order_acquire)) return made;
    const size_t row = 2 * frequencies_.size();
    auto* data = new float[row * kBlock];
    for (int i = 0; i < kBlock; ++i) compute(static_cast<int64_t>(block) * kBlock + i, data + i * row);
    blocks_[block].store(data, std::memory_order_release);
    return data;
  }

  std::vector<float> frequencies_;
  float scale_;
  std::mutex mutex_;
  std::unique_ptr<std::atomic<float*>[]> blocks_;
};

}  // namespace mantou
