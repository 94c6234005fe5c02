// What a server serves: the checkpoint's facts, its tokenizer and template, and the limits that
// jobs are checked against. Immutable while the server runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "extractor/checkpoint/checkpoint_index.h"
#include "extractor/engine/engine.h"
#include "extractor/shard/final_check.h"
#include "extractor/shard/shard_writer.h"
#include "extractor/text/chat_template.h"
#include "extractor/text/tokenizer.h"
#include "proto/messages/sample_text.h"
#include "server/store/job_store.h"

namespace statetap {

struct ServedModel {
  std::string name, path, digest;
  ModelConfig config;
  bool quantized = false;
  int64_t parameters = 0;
  std::shared_ptr<const Tokenizer> tokenizer;
  TemplateKind template_kind = TemplateKind::kNone;
  // Sampling one ends an answer: the checkpoint's, and <|im_end|> and [EOS] where the tokenizer
  // names them. Ascending, each once.
  std::vector<int32_t> stop_ids;
  double inner_eps = 0;
  int max_seq_len = 0;
  TokenScorer scorer;  // its final norm and head, from the checkpoint; null: none

  // Opens the tokenizer beside the weights.
  static absl::StatusOr<ServedModel> Of(const CheckpointIndex& checkpoint,
                                        const EngineOptions& options, const EngineInfo& info);
  // Boundaries 2, N/2, N−3; empty below 7 layers, where they must be given.
  std::vector<int> DefaultTaps() const;
  ContentConfig Content(TemplateKind kind) const;
  TextModel text() const { return {tokenizer.get(), template_kind, config.vocab}; }
  bool IsStop(int32_t id) const;
  std::string RopeJson() const;  // the rope parameters as a JSON object
  std::string_view quantization() const { return quantized ? "int4-g32" : "none"; }
};

// Where the checkpoint cannot be read any more the log says so and nothing is scored: a job is not
// to wait for that. `scorer` may be null.
void ScoreFinals(const TokenScorer& scorer, FinalCheck& finals);

// Empty, or which field of a job's content differs from what this server would make, with both
// values and what would help.
std::string ContentConflict(const ContentConfig& job, const ContentConfig& server);

inline constexpr std::string_view kProducer = "statetap 0.1.0";

}  // namespace statetap
