// An expression over samples, the meaning of --where everywhere:
//   source == "toolbench" and not (tokens > 4096 or meta.lang in ("de", "fr"))
//
// Fields: id, source, split, finish (text), index, prompt_tokens, tokens, supervised_tokens,
// generated_tokens, logprob (the mean of the sampled tokens; numbers), truncated (true or false)
// and meta.NAME or meta."NAME" (whatever the sample's meta holds). Comparisons: == != < <= > >= and
// in (…); text is compared by bytes. A comparison with a value that is missing or of another kind
// is false, so `not` of it is true. `or` binds less than `and`, `and` less than `not`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "extractor/base/status.h"
#include "extractor/shard/shard_writer.h"

namespace statetap {

struct SampleFacts {
  std::string_view id, source, split, finish, meta_json;
  int64_t index = 0, prompt_tokens = 0, tokens = 0, supervised_tokens = 0, generated_tokens = 0;
  std::optional<double> logprob;
  bool truncated = false;
};

// Of a sample as stored; its texts are the record's. Nothing was sampled of one that was given
// whole (finish prefill): it has no generated tokens and no logprob.
SampleFacts FactsOf(const SampleRecord& record);

// Immutable; a copy shares the expression.
class SampleFilter {
 public:
  // Holds for every sample.
  SampleFilter() = default;
  // Of an empty text: holds for every sample. INVALID_ARGUMENT names the place and what is wanted
  // there.
  static absl::StatusOr<SampleFilter> Parse(std::string_view text);

  bool Holds(const SampleFacts& sample) const;
  bool holds_for_all() const { return root_ == nullptr; }

  struct Node;

 private:
  explicit SampleFilter(std::shared_ptr<const Node> root) : root_(std::move(root)) {}
  std::shared_ptr<const Node> root_;
};

}  // namespace statetap
