// MLA over the paged latent cache, absorbed: one token and one head at a time.
#include <algorithm>
#include <cmath>

#include "extractor/backend/cpu/cpu_backend.h"
#include "extractor/backend/cpu/cpu_weights.h"
#include "extractor/backend/cpu/matmul.h"

namespace statetap::cpu {
namespace {

// Interleaved: pair (2i, 2i + 1) turns by angle i.
void Rotate(float* x, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

}  // namespace

float* CpuBackend::CacheRow(const Step& step, int layer, int sequence, int position) {
  const int page = step.page_table[int64_t{sequence} * step.pages_per_seq + position / kPageTokens];
  return CacheRow(layer, page, position % kPageTokens);
}

void CpuBackend::WriteCache(const Step& step, const AttentionParams& p) {
  const auto& rotary = *static_cast<const Rotary*>(p.rotary);
  const int row = p.query_dim + p.kv_lora + p.rope_dim;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    const float* latent = static_cast<const float*>(p.latents) + t * row + p.query_dim;
    float* to = CacheRow(step, p.layer, step.sequence[t], step.positions[t]);
    std::copy_n(latent, p.kv_lora + p.rope_dim, to);
    const int64_t angle = int64_t{step.positions[t]} * rotary.pairs;
    Rotate(to + p.kv_lora, rotary.cos.data() + angle, rotary.sin.data() + angle, rotary.pairs);
  }
}

void CpuBackend::AttendHead(const Step& step, const AttentionParams& p, int token, int head,
                            float* scratch) {
  const int latent_dim = p.kv_lora + p.rope_dim, position = step.positions[token];
  float* absorbed = scratch;                // [kv_lora + rope]: U_hᵀ q_nope | q_pe
  float* weighted = absorbed + latent_dim;  // [kv_lora]
  float* scores = weighted + latent_dim;    // [position + 1]
  const float* query =
      queries_.data() + (int64_t{token} * p.num_heads + head) * (p.nope_dim + p.rope_dim);
  const float* up =
      kv_b_.data() + int64_t{head} * (p.nope_dim + p.v_dim) * p.kv_lora;  // U_h, then V_h

  std::fill_n(absorbed, p.kv_lora, 0.0f);
  AxpyRows(query, up, p.kv_lora, p.nope_dim, p.kv_lora, absorbed);
  std::copy_n(query + p.nope_dim, p.rope_dim, absorbed + p.kv_lora);

  // A page's rows lie one behind the other.
  const auto for_each_page = [&](auto body) {
    for (int j = 0; j <= position; j += kPageTokens) {
      body(j, CacheRow(step, p.layer, step.sequence[token], j),
           std::min(kPageTokens, position + 1 - j));
    }
  };
  for_each_page([&](int j, const float* rows, int count) {
    Dots(absorbed, rows, latent_dim, count, latent_dim, scores + j);
  });
  float largest = -INFINITY;
  for (int j = 0; j <= position; ++j) largest = std::max(largest, scores[j] *= p.scale);
  float sum = 0;
  for (int j = 0; j <= position; ++j) sum += scores[j] = std::exp(scores[j] - largest);
  std::fill_n(weighted, p.kv_lora, 0.0f);
  for_each_page([&](int j, const float* rows, int count) {
    AxpyRows(scores + j, rows, latent_dim, count, p.kv_lora, weighted);
  });
  float* out = heads_.data() + (int64_t{token} * p.num_heads + head) * p.v_dim;
  for (int i = 0; i < p.v_dim; ++i)
    out[i] = Dot(up + int64_t{p.nope_dim + i} * p.kv_lora, weighted, p.kv_lora) / sum;
}

void CpuBackend::Attention(const Step& step, const AttentionParams& p) {
  const auto& rotary = *static_cast<const Rotary*>(p.rotary);
  const int row = p.query_dim + p.kv_lora + p.rope_dim, head_dim = p.nope_dim + p.rope_dim;
  WriteCache(step, p);
  kv_b_ = AsMatrix(p.kv_b).ReadAll();
  const Matrix& q_b = AsMatrix(p.q_b);
  MatMul({static_cast<const float*>(p.latents), row, step.num_tokens, q_b.reader(), q_b.rows(),
          q_b.cols(), queries_.data(), int64_t{p.num_heads} * head_dim},
         pool_);
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    const int64_t angle = int64_t{step.positions[t]} * rotary.pairs;
    for (int head = 0; head < p.num_heads; ++head) {
      Rotate(queries_.data() + (t * p.num_heads + head) * head_dim + p.nope_dim,
             rotary.cos.data() + angle, rotary.sin.data() + angle, rotary.pairs);
    }
  }
  const size_t scratch = attention_.size() / static_cast<size_t>(pool_.num_threads());
  pool_.ParallelFor(
      int64_t{step.num_tokens} * p.num_heads, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i) {
          AttendHead(step, p, static_cast<int>(i / p.num_heads), static_cast<int>(i % p.num_heads),
                     attention_.data() + static_cast<size_t>(thread) * scratch);
        }
      });
  const Matrix& o = AsMatrix(p.o);
  MatMul({heads_.data(), int64_t{p.num_heads} * p.v_dim, step.num_tokens, o.reader(), o.rows(),
          o.cols(), static_cast<float*>(p.partial), p.hidden},
         pool_);
}

}  // namespace statetap::cpu
