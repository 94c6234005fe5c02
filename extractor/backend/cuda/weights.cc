#include "extractor/backend/cuda/weights.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rows.h"

namespace statetap::cuda {
namespace {

constexpr size_t kLaneBytes = size_t{4} << 20;
constexpr int kLanes = 4;

Source SourceOf(DType dtype) {
  return dtype == DType::kF32   ? Source::kFloat
         : dtype == DType::kF16 ? Source::kHalf
                                : Source::kBf16;
}

}  // namespace

Uploader::Uploader(int device) : device_(device) {}

Uploader::Lane& Uploader::Take(size_t row_bytes) {
  Check(cudaSetDevice(device_));
  std::unique_lock lock(mutex_);
  while (true) {
    for (const auto& lane : lanes_) {
      if (lane->taken) continue;
      lane->taken = true;
      if (lane->host.size() < row_bytes) {
        Check(cudaStreamSynchronize(lane->stream.get()));
        lane->host.Reserve(row_bytes);
        lane->device.Reserve(row_bytes);
      }
      return *lane;
    }
    if (lanes_.size() < kLanes) {
      lanes_.push_back(std::make_unique<Lane>());
      lanes_.back()->host = PinnedBuffer(std::max(kLaneBytes, row_bytes));
      lanes_.back()->device = DeviceBuffer(std::max(kLaneBytes, row_bytes));
      continue;
    }
    free_.wait(lock);
  }
}

void Uploader::Give(Lane& lane) {
  {
    const std::lock_guard lock(mutex_);
    lane.taken = false;
  }
  free_.notify_one();
}

void Uploader::Stage(Lane& lane, int64_t rows, size_t row_bytes, const std::byte* from,
                     int64_t stride_bytes) {
  Check(cudaEventSynchronize(lane.busy.get()));
  auto* to = lane.host.as<std::byte>();
  if (stride_bytes == static_cast<int64_t>(row_bytes)) {
    std::memcpy(to, from, static_cast<size_t>(rows) * row_bytes);
  } else {
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(to + static_cast<size_t>(row) * row_bytes, from + row * stride_bytes, row_bytes);
  }
  Check(cudaMemcpyAsync(lane.device.as<void>(), to, static_cast<size_t>(rows) * row_bytes,
                        cudaMemcpyHostToDevice, lane.stream.get()));
}

void Uploader::Finish() {
  Check(cudaSetDevice(device_));
  for (const auto& lane : lanes_) Check(cudaStreamSynchronize(lane->stream.get()));
  lanes_.clear();
}

DeviceMatrix::DeviceMatrix(int64_t rows, int64_t cols, DType stored, Uploader& uploader)
    : rows_(rows),
      cols_(cols),
      stored_(stored),
      uploader_(uploader),
      values_(static_cast<size_t>(rows * cols) * sizeof(bf16)) {
  if (rows == 1) vector_ = DeviceBuffer(static_cast<size_t>(cols) * sizeof(float));
}

void DeviceMatrix::Fill(int, int64_t first_row, int64_t rows, const std::byte* from,
                        int64_t stride_bytes) {
  assert(first_row + rows <= rows_);
  uploader_.Run(rows, static_cast<size_t>(cols_) * SizeOf(stored_), from, stride_bytes,
                [&](const void* piece, int64_t row, int64_t count, cudaStream_t stream) {
                  Convert({piece, SourceOf(stored_), count, cols_,
                           values_.as<bf16>() + (first_row + row) * cols_,
                           rows_ == 1 ? vector_.as<float>() : nullptr},
                          stream);
                });
}

DeviceExperts::DeviceExperts(const ExpertsShape& shape, Uploader& uploader)
    : shape_(shape),
      blocks_{shape.hidden, shape.width, shape.int4 ? kInt4BlockBytes : kBf16BlockBytes},
      uploader_(uploader),
      memory_(static_cast<size_t>(shape.num_slots) *
                  static_cast<size_t>(blocks_.gate_up_bytes() + blocks_.down_bytes()),
              /*zeroed=*/true),
      slot_of_expert_(shape.slot_of_expert.size() * sizeof(int32_t)) {
  if (shape.hidden % 8 != 0) {
    Fail("hidden_size = " + std::to_string(shape.hidden) +
         ": the experts' kernels need a multiple of 8");
  }
  CopyIn(slot_of_expert_.as<void>(), shape.slot_of_expert.data(), slot_of_expert_.size());
}

void DeviceExperts::Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
                         int64_t stride_bytes) {
  const bool scales = part % 2 != 0;
  const auto projection = static_cast<Projection>(part / 2 % 3);
  const bool down = projection == Projection::kDown;
  const int columns = down ? shape_.width : shape_.hidden;
  const DType stored = scales ? shape_.scale_dtype : shape_.int4 ? DType::kI32 : shape_.dtype;
  const auto elements = static_cast<size_t>(scales        ? columns / kScaleGroup
                                            : shape_.int4 ? columns / 8
                                                          : columns);
  unsigned char* slot = memory() + part / 6 * slot_bytes();
  PackParams pack{};
  pack.projection = projection;
  pack.columns = columns;
  pack.to = down ? slot + blocks_.gate_up_bytes() : slot;
  pack.k_blocks = down ? blocks_.down_k_blocks() : blocks_.gate_up_k_blocks();
  uploader_.Run(rows, elements * SizeOf(stored), from, stride_bytes,
                [&](const void* piece, int64_t row, int64_t count, cudaStream_t stream) {
                  PackParams p = pack;
                  p.from = piece;
                  p.first_row = static_cast<int>(first_row + row);
                  p.rows = static_cast<int>(count);
                  if (scales) return PackScales(p, stored, stream);
                  if (shape_.int4) return PackInt4(p, stream);
                  PackValues(p, stored, stream);
                });
}

}  // namespace statetap::cuda
