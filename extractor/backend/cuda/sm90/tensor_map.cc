#include "extractor/backend/cuda/sm90/tensor_map.h"

#include <array>

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {
namespace {

// By the runtime, so that nothing links the driver.
decltype(&cuTensorMapEncodeTiled) FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found));
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// steps: bytes from one index of a dimension to the next, but for the first.
template <size_t kRank>
CUtensorMap Encode(const __nv_bfloat16* x, const std::array<cuuint64_t, kRank>& sizes,
                   const std::array<cuuint64_t, kRank - 1>& steps,
                   const std::array<cuuint32_t, kRank>& box) {
  static const auto encode = FindEncode();
  std::array<cuuint32_t, kRank> every;
  every.fill(1);
  CUtensorMap map;
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<__nv_bfloat16*>(x),
             sizes.data(), steps.data(), box.data(), every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    Fail("a tensor map was refused");
  }
  return map;
}

}  // namespace

CUtensorMap MakeTensorMap(const __nv_bfloat16* x, int64_t rows, int64_t columns, int box_rows) {
  const auto wide = static_cast<cuuint64_t>(columns);
  return Encode<2>(x, {wide, static_cast<cuuint64_t>(rows)}, {wide * sizeof(*x)},
                   {kMapColumns, static_cast<cuuint32_t>(box_rows)});
}

CUtensorMap MakeWeightMap(const __nv_bfloat16* w, int64_t rows, int64_t columns, int box_rows) {
  const auto wide = static_cast<cuuint64_t>(columns);
  const cuuint64_t row = wide * sizeof(*w);
  return Encode<5>(w, {wide, 2, 4, 4, static_cast<cuuint64_t>(rows) / 32},
                   {row, 8 * row, 2 * row, 32 * row},
                   {kMapColumns, 2, 4, 4, static_cast<cuuint32_t>(box_rows) / 32});
}

}  // namespace statetap::cuda
