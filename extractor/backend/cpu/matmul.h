// Products of rows with weight rows: fp32, in one fixed order.
//
// A dot product is 16 running sums, lane i taking elements i, i + 16, …, added in a fixed tree at
// the end. Vector units of any width give the same bits, and so do any batch and any number of
// threads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "extractor/base/worker_pool.h"

namespace statetap::cpu {

float Dot(const float* a, const float* b, int n);
// y += scale * x
void Axpy(float scale, const float* x, float* y, int n);
// out[i] = Dot(a, row i), for `count` rows that lie `stride` floats apart.
void Dots(const float* a, const float* rows, int64_t stride, int count, int n, float* out);
// y += scales[i] * row i, one row after the other.
void AxpyRows(const float* scales, const float* rows, int64_t stride, int count, int n, float* y);

// Writes weight row `row` as fp32 into to[0, cols).
using RowReader = std::function<void(int64_t row, float* to)>;

// y[t][o] = dot(x[t], W[o]) for t in [0, num_rows), o in [0, out); rows of x and y lie x_stride and
// y_stride floats apart.
struct MatMulParams {
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  RowReader weight;
  int64_t out, cols;
  float* y;
  int64_t y_stride;
};
void MatMul(const MatMulParams& params, WorkerPool& pool);
// Several at once: the pool splits all their weight rows together.
void MatMuls(std::span<const MatMulParams> products, WorkerPool& pool);

}  // namespace statetap::cpu
