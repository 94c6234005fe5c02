// States that vLLM's connector or speculators wrote: safetensors files with hidden_states
// [tokens, slots, hidden] and token_ids [tokens], one a sequence. A sample is found by its tokens.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "client/cli/sample_source.h"

namespace statetap {

class ForeignStates {
 public:
  // The files of DIR/hidden_states, or of DIR where it has no such folder. Reads headers and
  // tokens. INVALID_ARGUMENT where there is none, or one has other tensors, names the file.
  static absl::StatusOr<ForeignStates> Open(const std::filesystem::path& folder);

  // Of the file whose tokens are these, or all but the last of these: vLLM leaves out the one it
  // sampled last. `boundaries`: of the slots, in their order. INVALID_ARGUMENT where they are not
  // as many.
  absl::StatusOr<std::optional<SampleStates>> Find(const std::vector<int32_t>& ids,
                                                   const std::vector<int>& boundaries, int layers);
  std::vector<std::string> Unused() const;  // files that no Find gave

 private:
  std::filesystem::path folder_;
  std::map<std::vector<int32_t>, std::string> files_;  // by tokens: names; the first of several
  std::set<std::string> unused_;
};

}  // namespace statetap
