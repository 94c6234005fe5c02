#include "client/lib/local_model.h"

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "proto/messages/sample_text.h"

namespace statetap {
absl::StatusOr<LocalModel> LocalModel::Open(const std::filesystem::path& folder) {
  LocalModel model;
  STATETAP_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Open(folder));
  model.tokenizer_ = std::make_shared<const Tokenizer>(std::move(tokenizer));
  std::string model_type;
  const absl::StatusOr<std::string> config = ReadWholeFile(folder / "config.json");
  if (config.ok()) {
    STATETAP_ASSIGN_OR_RETURN(const Json json, ParseJson(*config));
    if (const Json* type = FindMember(json, "model_type"); type != nullptr && type->is_string())
      model_type = type->get<std::string>();
  } else if (!absl::IsNotFound(config.status())) {
    return config.status();
  }
  model.kind_ = DetectTemplate(model_type, *model.tokenizer_);
  return model;
}

absl::StatusOr<std::vector<v1::Rendered>> LocalModel::Render(const v1::JobOptions& options,
                                                             const v1::SampleInput& sample) const {
  STATETAP_RETURN_IF_ERROR(PlanText(options, MayGenerate(options), kind_).status());
  return RenderSample(sample, options, {tokenizer_.get(), kind_, tokenizer_->vocab()});
}

}  // namespace statetap
