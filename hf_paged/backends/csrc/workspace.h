// Memory that outlives a call, so that no step pays for fresh pages.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace hfp {

// Grows and never shrinks; what it held is lost when it grows.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Returns at least `count` of T on a cache line's boundary, or null if there is no memory.
  template <class T>
  T* get(int64_t count) {
    const int64_t wanted = count * static_cast<int64_t>(sizeof(T));
    if (wanted > size_) {
      std::free(data_);
      size_ = (wanted + wanted / 4 + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, static_cast<size_t>(size_));
      if (!data_) size_ = 0;
    }
    return static_cast<T*>(data_);
  }

  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Serves one call at a time.
struct Workspace {
  Buffer tasks, counters, states, scratch;
};

}  // namespace hfp
