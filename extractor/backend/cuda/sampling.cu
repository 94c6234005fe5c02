#include "extractor/backend/cuda/sampling.h"

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/philox.h"

namespace statetap::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 16;  // of a selection pass: four bits of the key
constexpr unsigned kAll = 0xffffffffu;

struct Row {
  const float* logits;
  int64_t rank_stride;
  int vocab, vocab_per_rank;
  __device__ float at(int id) const {
    return logits[id / vocab_per_rank * rank_stride + id % vocab_per_rank];
  }
};

// Larger logits have larger keys.
__device__ uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);  // −0 ties with 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float LogitOf(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// kCount sums over the block in a fixed order, left in totals[] for all threads.
template <int kCount>
__device__ void BlockSums(const double (&values)[kCount], double* totals) {
  __shared__ double warps[kWarps][kCount];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    double value = values[i];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
    if (lane == 0) warps[warp][i] = value;
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warps[w][threadIdx.x];
    totals[threadIdx.x] = sum;
  }
  __syncthreads();
}

// The place in the order (logit falling, then id rising) at which the running mass of
// weight(logit) reaches a goal: all logits above `key` are before it, and `ties` tokens with that
// very logit.
struct Cut {
  uint32_t key;
  int ties;     // tokens of the key up to and with the one that reaches the goal
  double mass;  // up to and with it
};

// kStrict: the mass must exceed the goal instead of reaching it. Tokens at or behind `limit` count
// nothing. Where the goal is never reached, the cut is behind the last token with weight.
template <bool kStrict, typename Weight>
__device__ Cut FindCut(const Row& row, double goal, const Weight& weight, double* totals) {
  uint32_t prefix = 0;
  double above = 0;
  for (int shift = 28; shift >= 0; shift -= 4) {
    double bins[kBins] = {};
    for (int id = static_cast<int>(threadIdx.x); id < row.vocab; id += kThreads) {
      const float logit = row.at(id);
      const uint32_t key = KeyOf(logit);
      if (shift < 28 && key >> (shift + 4) != prefix >> (shift + 4)) continue;
      const double mass = weight(logit);
      const uint32_t bin = key >> shift & 15u;
#pragma unroll
      for (uint32_t b = 0; b < kBins; ++b) bins[b] += b == bin ? mass : 0.0;
    }
    BlockSums(bins, totals);
    const double before = above;
    int chosen = -1, last = 0;
    for (int b = kBins - 1; b >= 0; --b) {
      if (totals[b] > 0) last = b;
      if (totals[b] > 0 && (kStrict ? above + totals[b] > goal : above + totals[b] >= goal)) {
        chosen = b;
        break;
      }
      if (b > 0) above += totals[b];
    }
    if (chosen < 0) {  // rounding left a rest: the last bin with mass
      chosen = last;
      above = before;
      for (int b = kBins - 1; b > chosen; --b) above += totals[b];
      goal = INFINITY;
    }
    prefix |= static_cast<uint32_t>(chosen) << shift;
    __syncthreads();
  }
  const double each = weight(LogitOf(prefix)), tied = totals[prefix & 15u];
  const int count = static_cast<int>(tied / each + 0.5);
  int ties = 1;
  while (ties < count && (kStrict ? above + ties * each <= goal : above + ties * each < goal))
    ++ties;
  return {prefix, ties, above + ties * each};
}

// The id of the n-th token, counted from 1, that has the key.
__device__ int NthWithKey(const Row& row, uint32_t key, int n) {
  __shared__ int found;
  __shared__ int warps[kWarps];
  if (threadIdx.x == 0) found = -1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int before = 0;
  for (int begin = 0; begin < row.vocab; begin += kThreads) {
    const int id = begin + static_cast<int>(threadIdx.x);
    const bool mine = id < row.vocab && KeyOf(row.at(id)) == key;
    const unsigned lanes = __ballot_sync(kAll, mine);
    if (lane == 0) warps[warp] = __popc(lanes);
    __syncthreads();
    int at = before + __popc(lanes & ((1u << lane) - 1)) + 1;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += warps[w];
      before += warps[w];
    }
    if (mine && at == n) found = id;
    __syncthreads();
    if (before >= n) break;
  }
  return found;
}

// A draw over all tokens in the order of their ids.
template <typename Weight>
__device__ int DrawById(const Row& row, double goal, const Weight& weight) {
  __shared__ double starts[kThreads + 1];
  __shared__ int found;
  const int each = (row.vocab + kThreads - 1) / kThreads;
  const int begin = min(row.vocab, static_cast<int>(threadIdx.x) * each),
            end = min(row.vocab, begin + each);
  double mass = 0;
  for (int id = begin; id < end; ++id) mass += weight(row.at(id));
  starts[threadIdx.x + 1] = mass;
  __syncthreads();
  if (threadIdx.x == 0) {
    found = row.vocab - 1;  // rounding left a rest
    starts[0] = 0;
    for (int i = 0; i < kThreads; ++i) starts[i + 1] += starts[i];
  }
  __syncthreads();
  double running = starts[threadIdx.x];
  if (running <= goal && goal < starts[threadIdx.x + 1]) {
    int id = begin;
    for (; id < end - 1; ++id) {
      running += weight(row.at(id));
      if (running > goal) break;
    }
    found = id;
  }
  __syncthreads();
  return found;
}

// One block a row.
__global__ void __launch_bounds__(kThreads) ChooseKernel(const ChooseTokensParams p) {
  __shared__ double totals[kBins];
  __shared__ float best_of[kWarps];
  __shared__ int id_of[kWarps];
  const int i = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Row row{p.logits + static_cast<int64_t>(i) * p.vocab_per_rank,
                static_cast<int64_t>(p.count) * p.vocab_per_rank, p.vocab, p.vocab_per_rank};

  float best = -INFINITY;
  int best_id = p.vocab;
  bool finite = true;
  for (int id = static_cast<int>(threadIdx.x); id < p.vocab; id += kThreads) {
    const float logit = row.at(id);
    finite = finite && isfinite(logit);
    if (logit > best) {
      best = logit;
      best_id = id;
    }
  }
  if (__syncthreads_or(!finite)) {
    if (threadIdx.x == 0) {
      p.ids[i] = 0;
      p.logprobs[i] = p.entropies[i] = NAN;
    }
    return;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kAll, best, offset);
    const int other_id = __shfl_xor_sync(kAll, best_id, offset);
    if (other > best || (other == best && other_id < best_id)) {
      best = other;
      best_id = other_id;
    }
  }
  if (lane == 0) {
    best_of[warp] = best;
    id_of[warp] = best_id;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    if (best_of[w] > best || (best_of[w] == best && id_of[w] < best_id)) {
      best = best_of[w];
      best_id = id_of[w];
    }
  }

  const double largest = best;
  double sums[2] = {};
  for (int id = static_cast<int>(threadIdx.x); id < p.vocab; id += kThreads) {
    const double under = row.at(id) - largest, weight = exp(under);
    sums[0] += weight;
    sums[1] += weight * under;
  }
  BlockSums(sums, totals);
  const double sum = totals[0], weighted = totals[1];
  __syncthreads();

  const StepPlan::Draw draw = p.draws[i];
  int id = draw.given;
  if (id < 0 && draw.temperature <= 0) id = best_id;
  if (id < 0) {
    const double temperature = draw.temperature;
    const auto weight = [=](float logit) {
      return exp((static_cast<double>(logit) - largest) / temperature);
    };
    const double uniform = UniformDraw(draw.seed, draw.key, static_cast<uint64_t>(draw.position));
    double all[1] = {};
    for (int token = static_cast<int>(threadIdx.x); token < p.vocab; token += kThreads)
      all[0] += weight(row.at(token));
    BlockSums(all, totals);
    const double mass = totals[0];
    __syncthreads();
    if (draw.top_p < 1) {
      const Cut nucleus = FindCut<false>(row, draw.top_p * mass, weight, totals);
      const Cut drawn = FindCut<true>(row, uniform * nucleus.mass, weight, totals);
      id = NthWithKey(row, drawn.key, drawn.ties);
    } else {
      id = DrawById(row, uniform * mass, weight);
    }
  }
  if (threadIdx.x != 0) return;
  const double log_sum = log(sum);
  p.ids[i] = id;
  p.logprobs[i] = static_cast<float>(row.at(id) - largest - log_sum);
  p.entropies[i] = static_cast<float>(log_sum - weighted / sum);
}

}  // namespace

void ChooseTokens(const ChooseTokensParams& p, cudaStream_t stream) {
  if (p.count == 0) return;
  ChooseKernel<<<static_cast<unsigned>(p.count), kThreads, 0, stream>>>(p);
  CheckLaunch();
}

}  // namespace statetap::cuda
