// A rank's dense products, the seam between the ranks, and the draw.
#include <algorithm>

#include "extractor/backend/cuda/check.h"
#include "extractor/backend/cuda/rank.h"
#include "extractor/backend/cuda/rows.h"
#include "extractor/backend/cuda/sampling.h"

namespace statetap::cuda {
void CudaBackend::MultiplyByPhase(const Step& step, GemmParams p, int first_row) {
  const int decode = Of(step).DecodeRowsOf({first_row, p.m}), prompt = p.m - decode;
  const Phase prompts = p.phase;
  p.m = decode;
  p.phase = Phase::kDecode;
  MultiplyFew(p);
  p.m = prompt;
  p.phase = prompts;
  p.x += decode * p.x_stride;
  p.y = static_cast<std::byte*>(p.y) +
        decode * p.y_stride * static_cast<int64_t>(p.fp32_out ? sizeof(float) : sizeof(bf16));
  gemm_.Run(p, stream());
}

void CudaBackend::MultiplyFew(const GemmParams& p) {
  StreamProductParams few{};
  few.x = p.x;
  few.x_stride = p.x_stride;
  few.w = p.w;
  few.w_stride = p.w_stride;
  few.y = p.y;
  few.y_stride = p.y_stride;
  few.m = p.m;
  few.n = p.n;
  few.k = p.k;
  few.epilogue = p.fp32_out ? Epilogue::kFloat : p.accumulate ? Epilogue::kAdd : Epilogue::kBf16;
  few.batch = p.batch;
  few.x_batch = p.x_batch;
  few.w_batch = p.w_batch;
  few.y_batch = p.y_batch;
  if (p.w_by_k || (p.fp32_out && p.accumulate) || !Streamable(few)) return gemm_.Run(p, stream());
  StreamProduct(few, stream_workspace_, stream());
}

void CudaBackend::Multiply(const Step& step, const bf16* x, int64_t x_stride, RowRange rows,
                           const Weight& weight, void* y, int64_t y_stride, Phase prompts,
                           bool fp32_out, bool accumulate) {
  const DeviceMatrix& w = AsMatrix(weight);
  GemmParams p{x,
               x_stride,
               w.data(),
               w.cols(),
               y,
               y_stride,
               rows.count,
               static_cast<int>(w.rows()),
               static_cast<int>(w.cols())};
  p.phase = prompts;
  p.fp32_out = fp32_out;
  p.accumulate = accumulate;
  MultiplyByPhase(step, p, rows.begin);
}

void CudaBackend::Embed(const Step& step, const EmbedParams& p) {
  if (replays_) return;
  EmbedRows({step.ids, AsMatrix(p.table).data(), p.vocab_begin, p.vocab_count,
             static_cast<bf16*>(p.partial), step.num_tokens, p.hidden},
            stream());
}

void CudaBackend::ExchangeAddNorm(const Step& step, const ExchangeAddNormParams& p) {
  if (replays_) return;
  SumAddNormParams sum{};
  sum.hidden = p.hidden;
  sum.first_row = step.own.begin;
  sum.num_rows = step.own.count;
  sum.residual = static_cast<bf16*>(p.residual);
  sum.replace = p.first;
  sum.weight = p.weight == nullptr ? nullptr : AsMatrix(*p.weight).vector();
  sum.eps = p.eps;
  sum.normed = static_cast<bf16*>(p.normed);
  communicator_.ExchangeAddNorm(
      {p.partial, step.num_tokens, static_cast<size_t>(p.hidden) * sizeof(bf16), step.sharded,
       step.half},
      sum, stream());
}

void CudaBackend::Send(const Step& step, const void* partial, int hidden) {
  communicator_.Send({partial, step.num_tokens, static_cast<size_t>(hidden) * sizeof(bf16),
                      step.sharded, step.half},
                     stream());
}

void CudaBackend::LatentProject(const Step& step, const LatentProjectParams& p) {
  if (replays_) return;
  const auto* x = static_cast<const bf16*>(p.x);
  auto* latents = static_cast<bf16*>(p.latents);
  const int64_t row = p.query_dim + p.kv_lora + p.rope_dim;
  const int rows = step.own.count;
  if (rows == 0) return;
  const auto norm_of = [&](const Weight& weight, bf16* at, int width) {
    RmsNormParams params{};
    params.x = params.y = at;
    params.x_stride = params.y_stride = row;
    params.num_x_rows = params.num_rows = rows;
    params.weight = AsMatrix(weight).vector();
    params.hidden = width;
    params.eps = p.eps;
    return params;
  };
  const RmsNormParams kv_norm = norm_of(p.kv_a_norm, latents + p.query_dim, p.kv_lora);
  if (p.q_a != nullptr) {
    const RmsNormParams q_norm = norm_of(*p.q_a_norm, latents, p.query_dim);
    const DeviceMatrix &q_a = AsMatrix(*p.q_a), &kv_a = AsMatrix(p.kv_a);
    StreamProductParams both{};
    both.x = x;
    both.x_stride = p.hidden;
    both.w = q_a.data();
    both.w2 = kv_a.data();
    both.w_stride = both.k = p.hidden;
    both.y = latents;
    both.y_stride = row;
    both.m = Of(step).DecodeRowsOf(step.own);
    both.n = p.query_dim;
    both.n2 = static_cast<int>(kv_a.rows());
    RowRange rest = step.own;
    if (Streamable(both)) {
      StreamProduct(both, stream_workspace_, stream());
      rest = {step.own.begin + both.m, step.own.count - both.m};
    }
    if (rest.count > 0) {
      const int64_t done = rest.begin - step.own.begin;
      Multiply(step, x + done * p.hidden, p.hidden, rest, *p.q_a, latents + done * row, row,
               Phase::kOwnRows);
      Multiply(step, x + done * p.hidden, p.hidden, rest, p.kv_a,
               latents + done * row + p.query_dim, row, Phase::kOwnRows);
    }
    RmsNormBoth(q_norm, kv_norm, stream());
  } else {
    Check(cudaMemcpy2DAsync(latents, static_cast<size_t>(row) * sizeof(bf16), x,
                            static_cast<size_t>(p.hidden) * sizeof(bf16),
                            static_cast<size_t>(p.hidden) * sizeof(bf16), static_cast<size_t>(rows),
                            cudaMemcpyDeviceToDevice, stream()));
    Multiply(step, x, p.hidden, step.own, p.kv_a, latents + p.query_dim, row, Phase::kOwnRows);
    RmsNorm(kv_norm, stream());
  }
}

void CudaBackend::Gather(const Step& step, std::initializer_list<GatherParams> arrays) {
  if (!step.sharded) return;
  if (step.half >= 0)
    return communicator_.GatherBeside(step.half, arrays, step.num_tokens, stream());
  for (const GatherParams& p : arrays)
    communicator_.GatherRows(p.own, step.num_tokens, p.row_bytes, p.all, stream());
}

void CudaBackend::Sample(const Step& step, const SampleParams& p) {
  if (p.count == 0) return;
  // Rows that a plan was rounded up by have no place on the host.
  const Planned& planned = Of(step);
  const int count = std::clamp(planned.num_logit_rows - p.first, 0, p.count),
            first = planned.first_logit_row + p.first;
  if (p.chosen != nullptr && count > 0) pending_tokens_.push_back({p.chosen, first, count});
  if (replays_) return;
  // Each logit row is normed by the rank that keeps it; the others add zeros.
  RmsNormParams norm{};
  norm.x = static_cast<const bf16*>(p.residual);
  norm.x_stride = norm.y_stride = norm.hidden = p.hidden;
  norm.rows = step.logit_rows + p.first;
  norm.first_row = step.own.begin;
  norm.num_x_rows = step.sharded || communicator_.rank() == 0 ? step.own.count : 0;
  norm.weight = AsMatrix(p.norm).vector();
  norm.y = picked_.as<bf16>();
  norm.num_rows = p.count;
  norm.eps = p.eps;
  RmsNorm(norm, stream());
  SumAddNormParams sum{};
  sum.hidden = p.hidden;
  sum.num_rows = p.count;
  sum.residual = normed_.as<bf16>();
  sum.replace = true;
  communicator_.ExchangeAddNorm({picked_.as<void>(), p.count,
                                 static_cast<size_t>(p.hidden) * sizeof(bf16), /*sharded=*/false},
                                sum, stream());

  const DeviceMatrix& head = AsMatrix(p.lm_head);
  GemmParams product{
      normed_.as<bf16>(),           p.hidden,         head.data(), head.cols(),
      logits_.as<float>(),          p.vocab_per_rank, p.count,     static_cast<int>(head.rows()),
      static_cast<int>(head.cols())};
  product.fp32_out = true;
  product.phase = Phase::kDecode;  // a few rows, of prompts too
  MultiplyFew(product);
  const float* logits = AllLogits(logits_.as<float>(), p.count, p.vocab_per_rank);
  if (p.chosen == nullptr) return;
  ChooseTokens({logits, p.count, p.vocab, p.vocab_per_rank, step.draws + p.first,
                results_.as<ChosenToken>() + first, choose_workspace_.as<void>()},
               stream());
}

const float* CudaBackend::AllLogits(const float* own, int count, int vocab_per_rank) {
  if (communicator_.world() == 1) return own;
  // Every rank's block is one row of as many.
  communicator_.GatherRows(
      own, communicator_.world(),
      static_cast<size_t>(count) * static_cast<size_t>(vocab_per_rank) * sizeof(float),
      all_logits_.as<void>(), stream());
  return all_logits_.as<float>();
}

}  // namespace statetap::cuda
