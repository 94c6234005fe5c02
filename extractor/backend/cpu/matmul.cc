#include "extractor/backend/cpu/matmul.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

// A build for each vector width, chosen at run time. The sanitizers' run-times cannot live with the
// resolvers that this makes.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define STATETAP_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define STATETAP_VECTOR_CLONES
#endif

namespace statetap::cpu {
namespace {

constexpr int kLanes = 16;
// may_alias and alignment 4: read straight from float arrays.
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int64_t kTokenBlock = 64;

inline __attribute__((always_inline)) float Sum(const Lanes& lanes) {
  float part[kLanes];
  std::memcpy(part, &lanes, sizeof(part));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

inline __attribute__((always_inline)) void LoadTail(const float* from, int n, Lanes& to) {
  float part[kLanes] = {};
  std::memcpy(part, from, static_cast<size_t>(n) * sizeof(float));
  std::memcpy(&to, part, sizeof(part));
}

template <int kWeights, int kTokens>
inline __attribute__((always_inline)) void Tile(const float* const* w, const float* const* x, int n,
                                                float* out) {
  Lanes sum[kWeights][kTokens] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes token[kTokens];
    for (int t = 0; t < kTokens; ++t) token[t] = *reinterpret_cast<const Lanes*>(x[t] + i);
    for (int r = 0; r < kWeights; ++r) {
      const Lanes weight = *reinterpret_cast<const Lanes*>(w[r] + i);
      for (int t = 0; t < kTokens; ++t) sum[r][t] += weight * token[t];
    }
  }
  if (i < n) {
    for (int r = 0; r < kWeights; ++r) {
      for (int t = 0; t < kTokens; ++t) {
        Lanes weight, token;
        LoadTail(w[r] + i, n - i, weight);
        LoadTail(x[t] + i, n - i, token);
        sum[r][t] += weight * token;
      }
    }
  }
  for (int r = 0; r < kWeights; ++r) {
    for (int t = 0; t < kTokens; ++t) out[r * kTokens + t] = Sum(sum[r][t]);
  }
}

STATETAP_VECTOR_CLONES void Tile2x4(const float* const* w, const float* const* x, int n,
                                    float* out) {
  Tile<2, 4>(w, x, n, out);
}
STATETAP_VECTOR_CLONES void Tile2x1(const float* const* w, const float* const* x, int n,
                                    float* out) {
  Tile<2, 1>(w, x, n, out);
}
STATETAP_VECTOR_CLONES float Dot1(const float* a, const float* b, int n) {
  float out;
  Tile<1, 1>(&a, &b, n, &out);
  return out;
}
STATETAP_VECTOR_CLONES void AxpyClones(float scale, const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] += scale * x[i];
}

// Two weight rows (the same one twice at an odd end) against a block of tokens.
void MultiplyPair(const MatMulParams& p, const float* const* w, int64_t o, int64_t rows, int64_t t0,
                  int64_t t1) {
  std::array<float, 8> out;
  int64_t t = t0;
  for (; t + 4 <= t1; t += 4) {
    const float* x[4];
    for (int i = 0; i < 4; ++i) x[i] = p.x + (t + i) * p.x_stride;
    Tile2x4(w, x, static_cast<int>(p.cols), out.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < 4; ++i)
        p.y[(t + i) * p.y_stride + o + r] = out[static_cast<size_t>(r * 4 + i)];
    }
  }
  for (; t < t1; ++t) {
    const float* x = p.x + t * p.x_stride;
    Tile2x1(w, &x, static_cast<int>(p.cols), out.data());
    for (int64_t r = 0; r < rows; ++r) p.y[t * p.y_stride + o + r] = out[static_cast<size_t>(r)];
  }
}

}  // namespace

float Dot(const float* a, const float* b, int n) { return Dot1(a, b, n); }
void Axpy(float scale, const float* x, float* y, int n) { AxpyClones(scale, x, y, n); }

void MatMul(const MatMulParams& p, WorkerPool& pool) {
  if (p.num_rows == 0) return;
  const int64_t pairs = (p.out + 1) / 2;
  pool.ParallelFor(pairs, [&](int64_t begin, int64_t end, int) {
    std::vector<float> buffer(static_cast<size_t>(2 * p.cols));
    const float* w[2] = {buffer.data(), buffer.data() + p.cols};
    for (int64_t t0 = 0; t0 < p.num_rows; t0 += kTokenBlock) {
      const int64_t t1 = std::min(t0 + kTokenBlock, p.num_rows);
      for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t o = pair * 2, rows = std::min<int64_t>(2, p.out - o);
        for (int64_t r = 0; r < 2; ++r)
          p.weight(o + std::min(r, rows - 1), buffer.data() + r * p.cols);
        MultiplyPair(p, w, o, rows, t0, t1);
      }
    }
  });
}

}  // namespace statetap::cpu
