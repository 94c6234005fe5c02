#include "extractor/backend/cuda/owners.h"

#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/base/log.h"

namespace statetap::cuda {
namespace {

void LogFailure(std::string_view what, cudaError_t code) {
  // At exit the driver may be gone before us.
  if (code != cudaSuccess && code != cudaErrorCudartUnloading)
    LogError("{}: {}", what, cudaGetErrorString(code));
}

}  // namespace

void Fail(const std::string& what, std::source_location where) {
  throw GpuError(fmt::format("{} ({}:{})", what, where.file_name(), where.line()));
}

void Release::operator()(CUstream_st* stream) const {
  LogFailure("cudaStreamDestroy", cudaStreamDestroy(stream));
}
void Release::operator()(CUevent_st* event) const {
  LogFailure("cudaEventDestroy", cudaEventDestroy(event));
}
void ReleaseDevice::operator()(void* memory) const { LogFailure("cudaFree", cudaFree(memory)); }
void ReleasePinned::operator()(void* memory) const {
  LogFailure("cudaFreeHost", cudaFreeHost(memory));
}

Stream::Stream() {
  cudaStream_t stream;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_.reset(stream);
}

Event::Event(bool timed) {
  cudaEvent_t event;
  Check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
  event_.reset(event);
}

void Event::Record(cudaStream_t stream) { Check(cudaEventRecord(event_.get(), stream)); }
void Event::Hold(cudaStream_t stream) const { Check(cudaStreamWaitEvent(stream, event_.get())); }

bool Event::Done() const {
  const cudaError_t code = cudaEventQuery(event_.get());
  if (code == cudaErrorNotReady) return false;
  Check(code);
  return true;
}

float Event::Since(const Event& earlier) const {
  Check(cudaEventSynchronize(event_.get()));
  float milliseconds;
  Check(cudaEventElapsedTime(&milliseconds, earlier.event_.get(), event_.get()));
  return milliseconds;
}

DeviceBuffer::DeviceBuffer(size_t bytes, bool zeroed) : size_(bytes) {
  void* memory;
  Check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
  memory_.reset(memory);
  if (zeroed) {
    Check(cudaMemset(memory, 0, bytes));
    // Our streams do not wait for the default one.
    Check(cudaStreamSynchronize(nullptr));
  }
}

void DeviceBuffer::Reserve(size_t bytes) {
  if (bytes <= size_) return;
  memory_.reset();
  *this = DeviceBuffer(bytes);
}

void CopyIn(void* device, const void* host, size_t bytes) {
  Check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
  Check(cudaStreamSynchronize(nullptr));
}

void CopyTogether(std::vector<RowCopy> copies, cudaStream_t stream) {
  std::erase_if(copies,
                [](const RowCopy& copy) { return copy.bytes == 0 || copy.to == copy.from; });
  if (copies.empty()) return;
#if CUDART_VERSION >= 13000
  std::vector<const void*> to, from;
  std::vector<size_t> bytes;
  for (const RowCopy& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    bytes.push_back(copy.bytes);
  }
  cudaMemcpyAttributes in_stream_order{};
  in_stream_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  Check(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &in_stream_order,
                             &first, 1, stream));
#else
  for (const RowCopy& copy : copies)
    Check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
#endif
}

PinnedBuffer::PinnedBuffer(size_t bytes) : size_(bytes) {
  void* memory;
  Check(cudaHostAlloc(&memory, std::max<size_t>(bytes, 1), cudaHostAllocPortable));
  memory_.reset(memory);
}

void PinnedBuffer::Reserve(size_t bytes) {
  if (bytes <= size_) return;
  memory_.reset();
  *this = PinnedBuffer(bytes);
}

}  // namespace statetap::cuda
