#include "extractor/engine/shared_gpus.h"

#include <fmt/format.h>

namespace statetap {

std::string SharedGpus(int ranks, int gpus, const std::function<bool(int)>& splits) {
  if (ranks <= gpus) return "";
  int own = gpus;
  while (own > 1 && !splits(own)) --own;
  return fmt::format(
      "--tp {}: {} can be used here, up to {} ranks share one, which has to hold them together and "
      "runs them in turns; --tp {} gives each rank a GPU",
      ranks, gpus == 1 ? "one GPU" : fmt::format("{} GPUs", gpus), (ranks + gpus - 1) / gpus, own);
}

}  // namespace statetap
