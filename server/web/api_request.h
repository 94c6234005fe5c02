// Requests of the OpenAI shape: JSON to what the model is asked. Everything that a request says is
// either done or refused by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/jobs/served_model.h"
#include "statetap/v1/jobs.pb.h"

namespace statetap {

struct ApiRequest {
  bool chat = false;
  std::vector<v1::SampleInput> prompts;  // at least one; of a chat exactly one
  v1::JobOptions options;
  bool generate = true;  // else the prompts are scored and nothing is written (max_tokens 0)
  bool echo = false;     // the prompt comes back before the answer, with scores if those are wanted
  bool scores = false;   // a log-probability a token
  int alternatives = 0;  // 0, or 1: the most likely token beside it
  std::vector<std::string> stop;  // the answer ends before any of them
  bool stream = false, stream_usage = false;
};

// The server's side of the defaults. `most_tokens`: of prompt and answer together.
struct ApiDefaults {
  const ServedModel& model;
  int most_tokens;
  uint64_t seed;  // where the request has none
};

// INVALID_ARGUMENT begins with the field, and says what is wrong with it and what would help;
// NOT_FOUND for another model's name.
absl::StatusOr<ApiRequest> ParseCompletionRequest(std::string_view body,
                                                  const ApiDefaults& defaults);
absl::StatusOr<ApiRequest> ParseChatRequest(std::string_view body, const ApiDefaults& defaults);

// Of /tokenize (a prompt, or messages as they would be rendered) and /detokenize, in vLLM's shape.
absl::StatusOr<std::vector<int32_t>> ParseTokenizeRequest(std::string_view body,
                                                          const ServedModel& model);
absl::StatusOr<std::vector<int32_t>> ParseDetokenizeRequest(std::string_view body,
                                                            const ServedModel& model);

}  // namespace statetap
