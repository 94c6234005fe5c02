// A checkpoint folder's tokenizer and template without a server: what the model would see of a
// sample, as the server's Render answers it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "extractor/base/status.h"
#include "extractor/text/chat_template.h"
#include "extractor/text/tokenizer.h"
#include "statetap/v1/model.pb.h"

namespace statetap {

class LocalModel {
 public:
  // Reads tiktoken.model, tokenizer_config.json and, where it is there, config.json. Errors name
  // the file.
  static absl::StatusOr<LocalModel> Open(const std::filesystem::path& folder);

  // As Model.Render answers: a refused sample has `error`. INVALID_ARGUMENT for options that cannot
  // be.
  absl::StatusOr<std::vector<v1::Rendered>> Render(const v1::JobOptions& options,
                                                   const v1::SampleInput& sample) const;
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  TemplateKind kind_ = TemplateKind::kNone;
};

}  // namespace statetap
