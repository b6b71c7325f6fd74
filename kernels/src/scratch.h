// Growing aligned buffers for a thread's temporaries. Contents are undefined after every `take`.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace mantou {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  uint8_t* take(size_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data_ = static_cast<uint8_t*>(std::aligned_alloc(64, capacity_));
      if (data_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  float* floats(size_t count) { return reinterpret_cast<float*>(take(count * sizeof(float))); }

 private:
  uint8_t* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace mantou
