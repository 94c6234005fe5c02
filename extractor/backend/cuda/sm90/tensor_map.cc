#include "extractor/backend/cuda/sm90/tensor_map.h"

#include "extractor/backend/cuda/check.h"

namespace statetap::cuda {

CUtensorMap MakeTensorMap(const __nv_bfloat16* x, int64_t rows, int64_t columns, int box_rows) {
  // By the runtime, so that nothing links the driver.
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found));
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                   strides[1] = {static_cast<cuuint64_t>(columns) * sizeof(*x)};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(x), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    Fail("a tensor map was refused");
  }
  return map;
}

}  // namespace statetap::cuda
