// Weights on a GPU: matrices in bf16 as they come, experts in blocks (weight_blocks.h). Filled from
// several threads through an Uploader.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "extractor/backend/backend.h"
#include "extractor/backend/cuda/gemm.h"
#include "extractor/backend/cuda/owners.h"
#include "extractor/backend/cuda/routed_ffn.h"

namespace statetap::cuda {

// Staging lanes of a rank, shared by the loader's threads: pinned memory, the same on the device, a
// stream. A lane is one thread's at a time.
class Uploader {
 public:
  explicit Uploader(int device);
  // Copies `rows` rows of row_bytes to the device in pieces and calls place(piece on the device,
  // first row of the piece, its rows, stream) for each. Returns before the last piece is placed.
  template <typename Place>
  void Run(int64_t rows, size_t row_bytes, const std::byte* from, int64_t stride_bytes,
           const Place& place) {
    if (rows == 0 || row_bytes == 0) return;
    const Hold hold{*this, Take(row_bytes)};
    Lane& lane = hold.lane;
    const auto rows_a_piece = static_cast<int64_t>(lane.host.size() / row_bytes);
    for (int64_t row = 0; row < rows; row += rows_a_piece) {
      const int64_t count = std::min(rows_a_piece, rows - row);
      Stage(lane, count, row_bytes, from + row * stride_bytes, stride_bytes);
      place(lane.device.as<void>(), row, count, lane.stream.get());
      lane.busy.Record(lane.stream.get());
    }
  }
  // Waits for all that was begun.
  void Finish();

 private:
  struct Lane {
    PinnedBuffer host;
    DeviceBuffer device;
    Stream stream;
    Event busy;
    bool taken = false;
  };
  struct Hold {
    Uploader& uploader;
    Lane& lane;
    ~Hold() { uploader.Give(lane); }
  };
  Lane& Take(size_t row_bytes);
  void Give(Lane& lane);
  static void Stage(Lane& lane, int64_t rows, size_t row_bytes, const std::byte* from,
                    int64_t stride_bytes);

  int device_;
  std::mutex mutex_;
  std::condition_variable free_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

class DeviceMatrix final : public Weight {
 public:
  DeviceMatrix(int64_t rows, int64_t cols, DType stored, Uploader& uploader);
  void Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
            int64_t stride_bytes) override;
  const bf16* data() const { return values_.as<bf16>(); }
  // Of a vector (one row): unrounded.
  const float* vector() const { return vector_.as<float>(); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t size_bytes() const { return static_cast<int64_t>(values_.size() + vector_.size()); }

 private:
  int64_t rows_, cols_;
  DType stored_;
  Uploader& uploader_;
  DeviceBuffer values_, vector_;
};

// One layer's routed experts of a rank: slot after slot, gate-up blocks then down blocks.
class DeviceExperts final : public Weight {
 public:
  DeviceExperts(const ExpertsShape& shape, Uploader& uploader);
  void Fill(int part, int64_t first_row, int64_t rows, const std::byte* from,
            int64_t stride_bytes) override;
  const ExpertsShape& shape() const { return shape_; }
  const ExpertBlocks& blocks() const { return blocks_; }
  Format format() const { return shape_.int4 ? Format::kInt4 : Format::kBf16; }
  int64_t slot_bytes() const { return blocks_.gate_up_bytes() + blocks_.down_bytes(); }
  const unsigned char* gate_up() const { return memory_.as<unsigned char>(); }
  const unsigned char* down() const { return gate_up() + blocks_.gate_up_bytes(); }
  unsigned char* memory() const { return memory_.as<unsigned char>(); }
  const int32_t* slot_of_expert() const { return slot_of_expert_.as<int32_t>(); }

 private:
  ExpertsShape shape_;
  ExpertBlocks blocks_;
  Uploader& uploader_;
  DeviceBuffer memory_, slot_of_expert_;
};

inline const DeviceMatrix& AsMatrix(const Weight& weight) {
  return static_cast<const DeviceMatrix&>(weight);
}
inline const DeviceExperts& AsExperts(const Weight& weight) {
  return static_cast<const DeviceExperts&>(weight);
}

// Puts rows of a projection, in the checkpoint's form, where the blocks want them. INT4 words are
// or-ed into zeroed memory: a word of a block holds nibbles of two rows, and rows come in any
// order.
struct PackParams {
  const void* from;  // [rows, words or values], one row behind the other
  Projection projection;
  int first_row, rows;
  int columns;  // K of the projection
  unsigned char* to;
  int k_blocks;
};
void PackInt4(const PackParams& params, cudaStream_t stream);                  // int32 [rows, K/8]
void PackScales(const PackParams& params, DType stored, cudaStream_t stream);  // [rows, K/32]
void PackValues(const PackParams& params, DType stored, cudaStream_t stream);  // [rows, K]

}  // namespace statetap::cuda
