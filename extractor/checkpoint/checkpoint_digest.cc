#include "extractor/checkpoint/checkpoint_digest.h"

#include <fcntl.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"

namespace statetap {
namespace {

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

absl::Status AddWindow(const File& file, const TensorInfo& info, int64_t begin, std::string& to) {
  const size_t size = static_cast<size_t>(std::min(kWindow, info.size_bytes - begin));
  const size_t end = to.size();
  to.resize(end + size);
  return file.ReadAt(info.offset + begin, std::as_writable_bytes(std::span(to).subspan(end, size)));
}

}  // namespace

absl::StatusOr<std::string> DigestOf(const ModelConfig& config, const TensorTable& table) {
  std::string content = "statetap-checkpoint-1\n" + ArithmeticFields(config) + "\n";
  for (const auto& [name, info] : table.tensors) {
    content += fmt::format("{} {} [{}] {}\n", name, NameOf(info.dtype), fmt::join(info.shape, ","),
                           info.size_bytes);
  }
  // By name, not by file: the same tensors cut into other shards are the same checkpoint.
  std::vector<File> files;
  for (const auto& path : table.files) {
    STATETAP_ASSIGN_OR_RETURN(File file, File::OpenForRead(path));
    // Or the kernel reads ahead 128 KiB for each window of 4.
    (void)posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_RANDOM);
    files.push_back(std::move(file));
  }
  for (const TensorInfo* info : Sampled(table.tensors)) {
    const File& file = files[info->file];
    STATETAP_RETURN_IF_ERROR(AddWindow(file, *info, 0, content));
    STATETAP_RETURN_IF_ERROR(AddWindow(file, *info, info->size_bytes / 2, content));
  }
  return Sha256Hex(content);
}

}  // namespace statetap
