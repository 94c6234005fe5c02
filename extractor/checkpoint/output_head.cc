#include "extractor/checkpoint/output_head.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "extractor/base/file.h"
#include "extractor/base/vector_clones.h"
#include "extractor/base/worker_pool.h"
#include "extractor/checkpoint/hf_cache.h"
#include "extractor/checkpoint/tensor_inventory.h"
#include "extractor/checkpoint/tensor_table.h"

namespace statetap {
namespace {

constexpr int64_t kPieceBytes = int64_t{32} << 20;  // of the head, read at once
constexpr int kLanes = 16, kRowsAtOnce = 4;
constexpr unsigned kMaxThreads = 8;  // a server has other work

void ToFloats(std::span<const uint16_t> bits, float* to) {
  for (size_t i = 0; i < bits.size(); ++i) to[i] = Bf16ToFloat(bits[i]);
}

// out[r] = weight · states[r] for `kRows` rows of `hidden` values. Lanes in a fixed order: the same
// sums for every vector width.
template <int kRows>
[[gnu::always_inline]] inline void Dot(const float* weight, const float* states, int hidden,
                                       float* out, size_t stride) {
  float lanes[kRows][kLanes] = {};
  int i = 0;
  for (; i + kLanes <= hidden; i += kLanes)
    for (int r = 0; r < kRows; ++r)
      for (int lane = 0; lane < kLanes; ++lane)
        lanes[r][lane] += weight[i + lane] * states[r * hidden + i + lane];
  for (int r = 0; r < kRows; ++r) {
    for (int lane = 0; i + lane < hidden; ++lane)
      lanes[r][lane] += weight[i + lane] * states[r * hidden + i + lane];
    float sum = 0;
    for (const float lane : lanes[r]) sum += lane;
    out[static_cast<size_t>(r) * stride] = sum;
  }
}

// Column `column` of logits [rows, tokens].
STATETAP_VECTOR_CLONES void LogitsOfToken(const float* weight, const float* states, int rows,
                                          int hidden, float* logits, int64_t column,
                                          int64_t tokens) {
  const auto stride = static_cast<size_t>(tokens);
  int row = 0;
  const auto at = [&] { return logits + static_cast<int64_t>(row) * tokens + column; };
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce)
    Dot<kRowsAtOnce>(weight, states + static_cast<int64_t>(row) * hidden, hidden, at(), stride);
  for (; row < rows; ++row)
    Dot<1>(weight, states + static_cast<int64_t>(row) * hidden, hidden, at(), stride);
}

}  // namespace

// Where a checkpoint's tensors lie.
struct OutputHead::Place {
  const std::filesystem::path& folder;
  const ModelConfig& config;
  const std::vector<std::filesystem::path>& files;
  const TensorMap& tensors;

  absl::StatusOr<const TensorInfo*> Find(const std::string& name,
                                         const std::vector<int64_t>& shape) const {
    const auto found = tensors.find(name);
    if (found == tensors.end())
      return absl::NotFoundError(fmt::format("{} has no tensor {}", folder.string(), name));
    const TensorInfo& tensor = found->second;
    if (tensor.dtype == DType::kBf16 && tensor.shape == shape) return &tensor;
    return absl::InvalidArgumentError(
        fmt::format("{}: {} is {}, {} is read", folder.string(), name,
                    DescribeTensor(NameOf(tensor.dtype), tensor.shape),
                    DescribeTensor(NameOf(DType::kBf16), shape)));
  }
};

absl::StatusOr<OutputHead> OutputHead::Open(const std::filesystem::path& path) {
  STATETAP_ASSIGN_OR_RETURN(const std::filesystem::path folder, SnapshotOf(path));
  STATETAP_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  STATETAP_ASSIGN_OR_RETURN(const TensorTable table, ReadTensorTable(folder, config));
  return OpenAt({folder, config, table.files, table.tensors});
}

absl::StatusOr<OutputHead> OutputHead::Open(const CheckpointIndex& checkpoint) {
  return OpenAt(
      {checkpoint.folder(), checkpoint.config(), checkpoint.files(), checkpoint.tensors()});
}

absl::StatusOr<OutputHead> OutputHead::OpenAt(const Place& place) {
  const ModelConfig& config = place.config;
  STATETAP_ASSIGN_OR_RETURN(const TensorInfo* const norm,
                            place.Find("model.norm.weight", {config.hidden}));
  STATETAP_ASSIGN_OR_RETURN(
      const TensorInfo* const head,
      place.Find(config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
                 {config.vocab, config.hidden}));
  OutputHead out;
  out.eps_ = config.rms_norm_eps;
  out.vocab_ = config.vocab;
  out.file_ = place.files[static_cast<size_t>(head->file)];
  out.offset_ = head->offset;
  std::vector<uint16_t> bits(static_cast<size_t>(config.hidden));
  STATETAP_ASSIGN_OR_RETURN(const File file,
                            File::OpenForRead(place.files[static_cast<size_t>(norm->file)]));
  STATETAP_RETURN_IF_ERROR(file.ReadAt(norm->offset, std::as_writable_bytes(std::span(bits))));
  out.norm_.resize(bits.size());
  ToFloats(bits, out.norm_.data());
  return out;
}

std::vector<float> OutputHead::Normed(std::span<const uint16_t> states) const {
  std::vector<float> normed(states.size());
  ToFloats(states, normed.data());
  for (size_t begin = 0; begin < normed.size(); begin += norm_.size()) {
    const auto row = std::span(normed).subspan(begin, norm_.size());
    double squares = 0;
    for (const float x : row) squares += double{x} * x;
    const auto scale =
        static_cast<float>(1 / std::sqrt(squares / static_cast<double>(row.size()) + eps_));
    for (size_t c = 0; c < row.size(); ++c) row[c] *= scale * norm_[c];
  }
  return normed;
}

absl::Status OutputHead::ForEachPiece(std::span<const uint16_t> states, const Visit& visit) const {
  const auto width = static_cast<int64_t>(norm_.size());
  const auto rows = static_cast<int64_t>(states.size()) / width;
  if (rows == 0) return absl::OkStatus();
  const std::vector<float> normed = Normed(states);
  const int64_t piece_tokens = std::clamp<int64_t>(kPieceBytes / (2 * width), 1, vocab_);
  STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForRead(file_));
  WorkerPool threads(
      static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, kMaxThreads)));
  std::vector<uint16_t> weights(static_cast<size_t>(piece_tokens * width));
  std::vector<float> logits(static_cast<size_t>(piece_tokens * rows));
  for (int64_t first = 0; first < vocab_; first += piece_tokens) {
    const int64_t tokens = std::min<int64_t>(piece_tokens, vocab_ - first);
    const auto piece = std::span(weights).first(static_cast<size_t>(tokens * width));
    STATETAP_RETURN_IF_ERROR(
        file.ReadAt(offset_ + first * width * 2, std::as_writable_bytes(piece)));
    threads.ParallelFor(tokens, [&](int64_t begin, int64_t end, int) {
      std::vector<float> weight(static_cast<size_t>(width));
      for (int64_t token = begin; token < end; ++token) {
        ToFloats(piece.subspan(static_cast<size_t>(token * width), weight.size()), weight.data());
        LogitsOfToken(weight.data(), normed.data(), static_cast<int>(rows), hidden(), logits.data(),
                      token, tokens);
      }
    });
    visit(first, std::span(logits).first(static_cast<size_t>(tokens * rows)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> OutputHead::LogProbabilities(
    std::span<const uint16_t> states, std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab_)
      return absl::OutOfRangeError(
          fmt::format("token {} is not in the head's vocabulary of {}", token, vocab_));
  }
  std::vector<double> chosen(tokens.size());
  std::vector<LogSumExp> all(tokens.size());
  STATETAP_RETURN_IF_ERROR(
      ForEachPiece(states, [&](int64_t first_token, std::span<const float> logits) {
        const size_t width = logits.size() / tokens.size();
        for (size_t row = 0; row < tokens.size(); ++row) {
          const auto of_row = logits.subspan(row * width, width);
          for (const float logit : of_row) all[row].Add(logit);
          const int64_t at = tokens[row] - first_token;
          if (at >= 0 && at < static_cast<int64_t>(width))
            chosen[row] = of_row[static_cast<size_t>(at)];
        }
      }));
  for (size_t row = 0; row < tokens.size(); ++row) chosen[row] -= all[row].value();
  return chosen;
}

void LogSumExp::Add(double x) {
  if (x <= most_) {
    sum_ += std::exp(x - most_);
    return;
  }
  sum_ = sum_ * std::exp(most_ - x) + 1;
  most_ = x;
}

double LogSumExp::value() const { return most_ + std::log(sum_); }

}  // namespace statetap
