#include "extractor/backend/cuda/sampling.h"

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/launch.h"
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

// A draw over the tokens [first, last) in the order of their ids.
template <typename Weight>
__device__ int DrawById(const Row& row, int first, int last, double goal, const Weight& weight) {
  __shared__ double starts[kThreads + 1];
  __shared__ int found;
  const int each = (last - first + kThreads - 1) / kThreads;
  const int begin = min(last, first + static_cast<int>(threadIdx.x) * each),
            end = min(last, begin + each);
  double mass = 0;
  for (int id = begin; id < end; ++id) mass += weight(row.at(id));
  starts[threadIdx.x + 1] = mass;
  __syncthreads();
  if (threadIdx.x == 0) {
    found = last - 1;  // rounding left a rest
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

// The parts of a row that blocks look at side by side, and what they leave for each other.
constexpr int kPartTokens = 4096, kPartThreads = 256;
constexpr int kFine = 4096;        // bins of a row's masses, by distance from the largest logit
constexpr double kFineANat = 256;  // the last one holds all that is less likely than e^-16
constexpr int kMostListed = 2048;  // tokens that are looked at one by one
constexpr double kOne = 17592186044416.0;  // 2^44: mass of the most likely token
using Mass = unsigned long long;
struct PartOfRow {
  double sum, weighted,
      drawn;  // of e^u, u · e^u with u = logit − largest; at the draw's temperature
  float best;
  int32_t best_id, finite;
};

__host__ __device__ int NumParts(int vocab) { return (vocab + kPartTokens - 1) / kPartTokens; }

// Tokens of a row that may be where the nucleus ends, or that may be drawn: in the order (logit
// falling, id rising) all others are before them, with `before`, or behind them.
struct Listed {
  Mass mass;
  float logit;
  int32_t id;
};
struct List {
  Mass before;
  int count;  // > kMostListed: there were too many
  Listed tokens[kMostListed];
};
struct Lists {
  Mass goal;  // of the nucleus
  List nucleus, drawn;
};

struct Workspace {
  Mass* bins;        // [count, kFine]
  Lists* lists;      // [count]
  PartOfRow* parts;  // [count, NumParts]
  __host__ __device__ Workspace(void* memory, int count)
      : bins(static_cast<Mass*>(memory)),
        lists(reinterpret_cast<Lists*>(bins + static_cast<int64_t>(count) * kFine)),
        parts(reinterpret_cast<PartOfRow*>(lists + count)) {}
};

__device__ Row RowOf(const ChooseTokensParams& p, int i) {
  return {p.logits + static_cast<int64_t>(i) * p.vocab_per_rank,
          static_cast<int64_t>(p.count) * p.vocab_per_rank, p.vocab, p.vocab_per_rank};
}
__device__ bool Draws(const StepPlan::Draw& draw) { return draw.given < 0 && draw.temperature > 0; }
__device__ bool CutsOf(const StepPlan::Draw& draw) { return Draws(draw) && draw.top_p < 1; }

__device__ double WeightOf(float logit, double largest, double temperature) {
  return exp((static_cast<double>(logit) - largest) / temperature);
}
__device__ int FineBinOf(float logit, double largest, double temperature) {
  const double bin = (largest - static_cast<double>(logit)) / temperature * kFineANat;
  return bin < kFine - 1 ? static_cast<int>(bin) : kFine - 1;
}
__device__ Mass MassOf(double weight) { return static_cast<Mass>(weight * kOne + 0.5); }

// The larger logit, ties to the lower id; the same on all lanes.
__device__ void BestOfWarp(float& best, int& id) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kAll, best, offset);
    const int other_id = __shfl_xor_sync(kAll, id, offset);
    if (other > best || (other == best && other_id < id)) {
      best = other;
      id = other_id;
    }
  }
}

// grid: (part, row).
__global__ void __launch_bounds__(kPartThreads) BestKernel(const ChooseTokensParams p) {
  __shared__ float best_of[kPartThreads / 32];
  __shared__ int id_of[kPartThreads / 32];
  const int i = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32;
  const Row row = RowOf(p, i);
  const Workspace work(p.workspace, p.count);
  const int begin = static_cast<int>(blockIdx.x) * kPartTokens,
            end = min(begin + kPartTokens, p.vocab);
  LetNextBegin();
  WaitForEarlier();
  for (int bin = static_cast<int>(blockIdx.x * kPartThreads + threadIdx.x); bin < kFine;
       bin += static_cast<int>(gridDim.x) * kPartThreads)
    work.bins[static_cast<int64_t>(i) * kFine + bin] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0)
    work.lists[i].nucleus.count = work.lists[i].drawn.count = 0;
  float best = -INFINITY;
  int best_id = p.vocab;
  bool finite = true;
#pragma unroll 4
  for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += kPartThreads) {
    const float logit = row.at(id);
    finite = finite && isfinite(logit);
    if (logit > best) {
      best = logit;
      best_id = id;
    }
  }
  BestOfWarp(best, best_id);
  if (threadIdx.x % 32 == 0) {
    best_of[warp] = best;
    id_of[warp] = best_id;
  }
  const bool all_finite = __syncthreads_and(finite) != 0;
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kPartThreads / 32; ++w) {
    if (best_of[w] > best || (best_of[w] == best && id_of[w] < best_id)) {
      best = best_of[w];
      best_id = id_of[w];
    }
  }
  work.parts[static_cast<int64_t>(i) * gridDim.x + blockIdx.x] = {
      0, 0, 0, best, best_id, all_finite ? 1 : 0};
}

struct BestOfRow {
  float logit;
  int id;
  bool finite;
};
// On all threads of a warp.
__device__ BestOfRow BestOf(const PartOfRow* parts, int num_parts) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float best = -INFINITY;
  int id = 0x7fffffff;
  bool finite = true;
  for (int part = lane; part < num_parts; part += 32) {
    const PartOfRow& at = parts[part];
    finite = finite && at.finite != 0;
    if (at.best > best || (at.best == best && at.best_id < id)) {
      best = at.best;
      id = at.best_id;
    }
  }
  BestOfWarp(best, id);
  return {best, id, __all_sync(kAll, finite) != 0};
}

// grid: (part, row). Sums of the part, and its tokens' masses into the row's bins.
__global__ void __launch_bounds__(kPartThreads) SumsKernel(const ChooseTokensParams p) {
  __shared__ Mass bins[kFine];
  __shared__ double sums[kPartThreads / 32][3];
  const int i = static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x) / 32;
  const Row row = RowOf(p, i);
  const Workspace work(p.workspace, p.count);
  PartOfRow* parts = work.parts + static_cast<int64_t>(i) * gridDim.x;
  const int begin = static_cast<int>(blockIdx.x) * kPartTokens,
            end = min(begin + kPartTokens, p.vocab);
  LetNextBegin();
  for (int bin = static_cast<int>(threadIdx.x); bin < kFine; bin += kPartThreads) bins[bin] = 0;
  __syncthreads();
  WaitForEarlier();
  const BestOfRow best = BestOf(parts, static_cast<int>(gridDim.x));
  if (!best.finite) return;
  const StepPlan::Draw draw = p.draws[i];
  const bool draws = Draws(draw), cuts = CutsOf(draw);
  double own[3] = {};
  for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += kPartThreads) {
    const float logit = row.at(id);
    const double under = static_cast<double>(logit) - best.logit, weight = exp(under);
    own[0] += weight;
    own[1] += weight * under;
    if (!draws) continue;
    const double drawn =
        draw.temperature == 1 ? weight : WeightOf(logit, best.logit, draw.temperature);
    own[2] += drawn;
    if (cuts) atomicAdd(&bins[FineBinOf(logit, best.logit, draw.temperature)], MassOf(drawn));
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    for (int offset = 16; offset > 0; offset /= 2) own[k] += __shfl_xor_sync(kAll, own[k], offset);
    if (threadIdx.x % 32 == 0) sums[warp][k] = own[k];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    PartOfRow& part = parts[blockIdx.x];
    for (int w = 1; w < kPartThreads / 32; ++w) {
      for (int k = 0; k < 3; ++k) own[k] += sums[w][k];
    }
    part.sum = own[0];
    part.weighted = own[1];
    part.drawn = own[2];
  }
  if (!cuts) return;
  Mass* to = work.bins + static_cast<int64_t>(i) * kFine;
  for (int bin = static_cast<int>(threadIdx.x); bin < kFine; bin += kPartThreads) {
    if (bins[bin] != 0) atomicAdd(&to[bin], bins[bin]);  // integers: any order gives the same sum
  }
}

// What the running mass must reach for the token to be drawn: its share of the nucleus, exceeded.
__device__ Mass DrawnGoal(double uniform, Mass nucleus) {
  const Mass at = static_cast<Mass>(uniform * static_cast<double>(nucleus)) + 1;
  return at < nucleus ? at : nucleus;
}

// The bin in which the running mass reaches a goal, and the mass before it.
struct BinReached {
  int bin;
  Mass before;
};

// grid: (part, row). Lists the tokens among which the nucleus ends and the draw falls. Where it
// falls depends a little on where exactly the nucleus ends, so that may be a few bins.
__global__ void __launch_bounds__(kPartThreads) ListKernel(const ChooseTokensParams p) {
  __shared__ Mass warps[kPartThreads / 32];
  __shared__ BinReached reached[3];
  constexpr int kEach = kFine / kPartThreads;
  const int i = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const Row row = RowOf(p, i);
  const Workspace work(p.workspace, p.count);
  LetNextBegin();
  WaitForEarlier();
  const StepPlan::Draw draw = p.draws[i];
  if (!CutsOf(draw)) return;
  const BestOfRow best =
      BestOf(work.parts + static_cast<int64_t>(i) * gridDim.x, static_cast<int>(gridDim.x));
  if (!best.finite) return;
  const Mass* bins = work.bins + static_cast<int64_t>(i) * kFine;
  Mass own[kEach], sum = 0;
#pragma unroll
  for (int b = 0; b < kEach; ++b) own[b] = bins[thread * kEach + b];
#pragma unroll
  for (int b = 0; b < kEach; ++b) sum += own[b];
  Mass until = sum;  // over the threads up to this one
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass other = __shfl_up_sync(kAll, until, offset);
    if (thread % 32 >= offset) until += other;
  }
  if (thread % 32 == 31) warps[thread / 32] = until;
  __syncthreads();
  Mass all = 0;
  for (int w = 0; w < kPartThreads / 32; ++w) {
    if (w < thread / 32) until += warps[w];
    all += warps[w];
  }
  const auto reach = [&](Mass goal, BinReached& to) {
    Mass running = until - sum;
    if (running >= goal || goal > until) return;
#pragma unroll
    for (int b = 0; b < kEach; ++b) {
      if (running < goal && goal <= running + own[b]) to = {thread * kEach + b, running};
      running += own[b];
    }
  };
  const double wanted = ceil(draw.top_p * static_cast<double>(all));
  const Mass goal = min(all, max(Mass{1}, static_cast<Mass>(wanted)));
  reach(goal, reached[0]);
  __syncthreads();
  const BinReached nucleus = reached[0];
  const double uniform = UniformDraw(draw.seed, draw.key, static_cast<uint64_t>(draw.position));
  // At most all of the bin is part of the nucleus.
  reach(DrawnGoal(uniform, goal), reached[1]);
  reach(DrawnGoal(uniform, nucleus.before + bins[nucleus.bin]), reached[2]);
  __syncthreads();
  const BinReached first = reached[1], last = reached[2];
  Lists& lists = work.lists[i];
  if (blockIdx.x == 0 && thread == 0) {
    lists.goal = goal;
    lists.nucleus.before = nucleus.before;
    lists.drawn.before = first.before;
  }
  const auto add = [](List& list, const Listed& token) {
    const int at = atomicAdd(&list.count, 1);
    if (at < kMostListed) list.tokens[at] = token;
  };
  const int begin = static_cast<int>(blockIdx.x) * kPartTokens,
            end = min(begin + kPartTokens, p.vocab);
#pragma unroll 4
  for (int id = begin + thread; id < end; id += kPartThreads) {
    const float logit = row.at(id);
    const int bin = FineBinOf(logit, best.logit, draw.temperature);
    const bool ends = bin == nucleus.bin, drawn = first.bin <= bin && bin <= last.bin;
    if (!ends && !drawn) continue;
    const Listed token{MassOf(WeightOf(logit, best.logit, draw.temperature)), logit, id};
    if (ends) add(lists.nucleus, token);
    if (drawn) add(lists.drawn, token);
  }
}

// Of a list the token at which the running mass reaches `goal`, and the mass up to and with it;
// found < 0: it is not in the list.
struct Reached {
  int found;
  Mass mass;
};
__device__ Reached FindReached(const List& list, Mass goal, Listed* tokens) {
  __shared__ int found;
  __shared__ Mass mass;
  const int thread = static_cast<int>(threadIdx.x), count = list.count;
  const Mass before = list.before;
  if (count > kMostListed) return {-1, 0};
  for (int i = thread; i < count; i += kThreads) tokens[i] = list.tokens[i];
  if (thread == 0) found = -1;
  __syncthreads();
  for (int i = thread; i < count; i += kThreads) {
    const Listed mine = tokens[i];
    Mass running = before;
    for (int j = 0; j < count; ++j) {
      const Listed other = tokens[j];
      if (other.logit > mine.logit || (other.logit == mine.logit && other.id < mine.id))
        running += other.mass;
    }
    if (running < goal && goal <= running + mine.mass) {
      found = mine.id;
      mass = running + mine.mass;
    }
  }
  __syncthreads();
  const Reached result{found, mass};
  __syncthreads();
  return result;
}

// For a row with thousands of tokens in a bin: by selection over the bits of the logit.
__device__ int DrawBySelection(const Row& row, const StepPlan::Draw& draw, double largest,
                               double mass, double uniform) {
  __shared__ double totals[kBins];
  const auto weight = [&](float logit) { return WeightOf(logit, largest, draw.temperature); };
  const Cut nucleus = FindCut<false>(row, draw.top_p * mass, weight, totals);
  const Cut drawn = FindCut<true>(row, uniform * nucleus.mass, weight, totals);
  return NthWithKey(row, drawn.key, drawn.ties);
}

// One block a row: the token, from the parts and the bins.
__global__ void __launch_bounds__(kThreads) ChooseKernel(const ChooseTokensParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* list = reinterpret_cast<Listed*>(shared);
  const int i = static_cast<int>(blockIdx.x), num_parts = NumParts(p.vocab);
  const Row row = RowOf(p, i);
  const Workspace work(p.workspace, p.count);
  const PartOfRow* parts = work.parts + static_cast<int64_t>(i) * num_parts;
  LetNextBegin();
  WaitForEarlier();
  const BestOfRow best = BestOf(parts, num_parts);
  if (!best.finite) {
    if (threadIdx.x == 0) p.chosen[i] = {0, NAN, NAN, 0, NAN};
    return;
  }
  const StepPlan::Draw draw = p.draws[i];
  int id = draw.given;
  if (id < 0 && draw.temperature <= 0) id = best.id;
  if (id < 0) {
    const double uniform = UniformDraw(draw.seed, draw.key, static_cast<uint64_t>(draw.position));
    double mass = 0;
    for (int part = 0; part < num_parts; ++part) mass += parts[part].drawn;
    if (draw.top_p < 1) {
      const Lists& lists = work.lists[i];
      const Reached nucleus = FindReached(lists.nucleus, lists.goal, list);
      if (nucleus.found >= 0)
        id = FindReached(lists.drawn, DrawnGoal(uniform, nucleus.mass), list).found;
      if (id < 0) id = DrawBySelection(row, draw, best.logit, mass, uniform);
    } else {
      // The part in which the running mass exceeds the goal, then the token in it.
      double before = 0;
      int part = 0;
      for (; part + 1 < num_parts && before + parts[part].drawn <= uniform * mass; ++part)
        before += parts[part].drawn;
      id = DrawById(row, part * kPartTokens, min((part + 1) * kPartTokens, p.vocab),
                    uniform * mass - before,
                    [&](float logit) { return WeightOf(logit, best.logit, draw.temperature); });
    }
  }
  if (threadIdx.x != 0) return;
  double sum = 0, weighted = 0;
  for (int part = 0; part < num_parts; ++part) {
    sum += parts[part].sum;
    weighted += parts[part].weighted;
  }
  const double log_sum = log(sum);
  p.chosen[i] = {id, static_cast<float>(static_cast<double>(row.at(id)) - best.logit - log_sum),
                 static_cast<float>(log_sum - weighted / sum), best.id,
                 static_cast<float>(-log_sum)};
}

}  // namespace

size_t ChooseWorkspaceBytes(int count, int vocab) {
  return static_cast<size_t>(count) * (static_cast<size_t>(NumParts(vocab)) * sizeof(PartOfRow) +
                                       sizeof(Lists) + kFine * sizeof(Mass));
}

void ChooseTokens(const ChooseTokensParams& p, cudaStream_t stream) {
  if (p.count == 0) return;
  constexpr size_t kListBytes = kMostListed * sizeof(Listed);
  Check(cudaFuncSetAttribute(ChooseKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kListBytes)));
  const auto rows = static_cast<unsigned>(p.count);
  const dim3 grid(static_cast<unsigned>(NumParts(p.vocab)), rows);
  LaunchEarly(BestKernel, grid, kPartThreads, 0, stream, p);
  LaunchEarly(SumsKernel, grid, kPartThreads, 0, stream, p);
  LaunchEarly(ListKernel, grid, kPartThreads, 0, stream, p);
  LaunchEarly(ChooseKernel, dim3(rows), kThreads, kListBytes, stream, p);
}

}  // namespace statetap::cuda
