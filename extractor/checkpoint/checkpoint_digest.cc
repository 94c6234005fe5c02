#include "extractor/checkpoint/checkpoint_digest.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "extractor/base/digest.h"
#include "extractor/checkpoint/scattered_read.h"

namespace statetap {
namespace {

// Checkpoints up to this size are read whole, larger ones in windows.
constexpr int64_t kReadWhole = int64_t{256} << 20;
constexpr int64_t kWindow = 4096;
constexpr int64_t kExpertSamples = 512;

bool IsExpert(std::string_view name) { return name.find(".mlp.experts.") != name.npos; }

// Everything beside the routed experts, and some hundred tensors of theirs.
std::vector<const TensorInfo*> Sampled(const TensorMap& tensors) {
  int64_t num_experts = 0;
  for (const auto& [name, info] : tensors) num_experts += IsExpert(name);
  const int64_t step = std::max<int64_t>(1, num_experts / kExpertSamples);
  std::vector<const TensorInfo*> sampled;
  int64_t expert = 0;
  for (const auto& [name, info] : tensors) {
    if (!IsExpert(name) || expert++ % step == 0) sampled.push_back(&info);
  }
  return sampled;
}

}  // namespace

absl::StatusOr<std::string> DigestOf(const ModelConfig& config, const TensorTable& table) {
  std::string content = "statetap-checkpoint-2\n" + ArithmeticFields(config) + "\n";
  for (const auto& [name, info] : table.tensors) {
    content += fmt::format("{} {} [{}] {}\n", name, NameOf(info.dtype), fmt::join(info.shape, ","),
                           info.size_bytes);
  }
  // By name, not by file: the same tensors cut into other shards are the same checkpoint.
  int64_t total_bytes = 0;
  for (const auto& [name, info] : table.tensors) total_bytes += info.size_bytes;
  const bool whole = total_bytes <= kReadWhole;
  struct Window {
    const TensorInfo* info;
    int64_t begin, size;
  };
  std::vector<Window> wanted;
  if (whole) {
    for (const auto& [name, info] : table.tensors) wanted.push_back({&info, 0, info.size_bytes});
  } else {
    for (const TensorInfo* info : Sampled(table.tensors)) {
      for (const int64_t begin : {int64_t{0}, info->size_bytes / 2})
        wanted.push_back({info, begin, std::min(kWindow, info->size_bytes - begin)});
    }
  }
  int64_t window_bytes = 0;
  for (const Window& window : wanted) window_bytes += window.size;
  std::vector<std::byte> windows(static_cast<size_t>(window_bytes));
  std::vector<SmallRead> reads;
  auto free = std::span(windows);
  for (const auto& [info, begin, size] : wanted) {
    reads.push_back({info->file, info->offset + begin, free.first(static_cast<size_t>(size))});
    free = free.subspan(static_cast<size_t>(size));
  }
  STATETAP_RETURN_IF_ERROR(ReadScattered(table.files, std::move(reads)));
  content.append(reinterpret_cast<const char*>(windows.data()), windows.size());
  return Sha256Hex(content);
}

}  // namespace statetap
