// States that vLLM's connector or speculators wrote: safetensors files with hidden_states
// [tokens, slots, hidden], bf16 or fp8 beside hidden_states_scales, and token_ids [tokens], one a
// sequence. A sample is found by its tokens.
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

  // Of the file with most tokens that `ids` begins with: vLLM writes the prompt alone, or all but
  // the token it sampled last. `boundaries`: of the slots, in their order. INVALID_ARGUMENT where
  // they are not as many.
  absl::StatusOr<std::optional<SampleStates>> Find(const std::vector<int32_t>& ids,
                                                   const std::vector<int>& boundaries, int layers);
  std::vector<std::string> Unused() const;  // files that no Find gave

 private:
  using Files = std::map<std::vector<int32_t>, std::string>;  // by tokens: names
  Files::const_iterator LongestThatBegins(std::vector<int32_t> ids) const;

  std::filesystem::path folder_;
  Files files_;  // the first of several with the same tokens
  std::set<std::string> unused_;
};

}  // namespace statetap
