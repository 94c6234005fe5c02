// What a rank owns on its device. Move-only; the current device must be the rank's on construction.
// Destructors log instead of throwing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace statetap::cuda {

struct Release {
  void operator()(CUstream_st* stream) const;
  void operator()(CUevent_st* event) const;
};
struct ReleaseDevice {
  void operator()(void* memory) const;
};
struct ReleasePinned {
  void operator()(void* memory) const;
};

class Stream {
 public:
  Stream();  // does not wait for the default stream
  cudaStream_t get() const { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, Release> stream_;
};

class Event {
 public:
  explicit Event(bool timed = false);
  cudaEvent_t get() const { return event_.get(); }
  void Record(cudaStream_t stream);
  // What comes next on `stream` waits for the last Record.
  void Hold(cudaStream_t stream) const;
  bool Done() const;
  // Of two timed events: milliseconds from the earlier one's last Record to this one's, waited for.
  float Since(const Event& earlier) const;

 private:
  std::unique_ptr<CUevent_st, Release> event_;
};

// Device memory, zeroed on request.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes, bool zeroed = false);
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  size_t size() const { return size_; }
  // New memory where the old is too small; the content is lost. Not in the layer loop.
  void Reserve(size_t bytes);

 private:
  std::unique_ptr<void, ReleaseDevice> memory_;
  size_t size_ = 0;
};

// Host to device, complete on return for every stream (a plain copy from pageable memory is not).
void CopyIn(void* device, const void* host, size_t bytes);

// Copies that none of each other waits for, in one go: one by one, each between GPUs begins 15 to
// 22 µs behind the one before. Nothing is copied onto itself. Within a GPU a kernel copies, which
// waits for room among others: not beside the ops of a stream.
struct RowCopy {
  void* to;
  const void* from;
  size_t bytes;
};
void CopyTogether(std::vector<RowCopy> copies, cudaStream_t stream);

// Host memory that copy engines reach.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  size_t size() const { return size_; }
  void Reserve(size_t bytes);

 private:
  std::unique_ptr<void, ReleasePinned> memory_;
  size_t size_ = 0;
};

}  // namespace statetap::cuda
