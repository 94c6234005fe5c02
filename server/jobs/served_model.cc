#include "server/jobs/served_model.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/base/log.h"
#include "extractor/checkpoint/output_head.h"

namespace statetap {
namespace {

// The outer model_type tells K2.5 from the text models that share its inner configuration.
absl::StatusOr<std::string> OuterModelType(const std::filesystem::path& folder) {
  STATETAP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(folder / "config.json"));
  STATETAP_ASSIGN_OR_RETURN(const Json config, ParseJson(text));
  const Json* type = FindMember(config, "model_type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : "";
}

std::vector<int32_t> StopIds(const CheckpointIndex& checkpoint, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids = checkpoint.stop_ids();
  for (const std::string_view name : {"<|im_end|>", "[EOS]"}) {
    if (const auto id = tokenizer.SpecialId(name)) ids.push_back(*id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

absl::StatusOr<ServedModel> ServedModel::Of(const CheckpointIndex& checkpoint,
                                            const EngineOptions& options, const EngineInfo& info) {
  STATETAP_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Open(checkpoint.folder()));
  if (tokenizer.vocab() > checkpoint.config().vocab) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: the tokenizer has {} tokens, config.json a vocab_size of {}: files of two models?",
        checkpoint.folder().string(), tokenizer.vocab(), checkpoint.config().vocab));
  }
  ServedModel model;
  model.name = checkpoint.name();
  model.path = std::filesystem::absolute(checkpoint.folder()).lexically_normal().string();
  model.digest = checkpoint.digest();
  model.config = checkpoint.config();
  model.quantized = checkpoint.quantized();
  model.parameters = checkpoint.parameters();
  model.tokenizer = std::make_shared<const Tokenizer>(std::move(tokenizer));
  STATETAP_ASSIGN_OR_RETURN(const std::string model_type, OuterModelType(checkpoint.folder()));
  model.template_kind = DetectTemplate(model_type, *model.tokenizer);
  model.stop_ids = StopIds(checkpoint, *model.tokenizer);
  model.inner_eps = options.inner_eps > 0 ? options.inner_eps : model.config.rms_norm_eps;
  model.max_seq_len = info.max_seq_len;
  STATETAP_ASSIGN_OR_RETURN(OutputHead head, OutputHead::Open(checkpoint));
  model.scorer = [head = std::move(head)](std::span<const uint16_t> states,
                                          std::span<const int32_t> tokens) {
    return head.LogProbabilities(states, tokens);
  };
  return model;
}

std::vector<int> ServedModel::DefaultTaps() const {
  const int layers = config.num_layers;
  if (layers < 7) return {};
  return {2, layers / 2, layers - 3};
}

ContentConfig ServedModel::Content(TemplateKind kind) const {
  return {digest, tokenizer->digest(), TemplateDigest(kind),
          "bf16", inner_eps,           fmt::format("[{}]", fmt::join(stop_ids, ","))};
}

bool ServedModel::IsStop(int32_t id) const {
  return std::binary_search(stop_ids.begin(), stop_ids.end(), id);
}

std::string ServedModel::RopeJson() const {
  const RopeConfig& rope = config.rope;
  Json object = {{"rope_theta", rope.theta}};
  if (rope.yarn) {
    object["type"] = "yarn";
    object["factor"] = rope.factor;
    object["original_max_position_embeddings"] = rope.original_positions;
    object["beta_fast"] = rope.beta_fast;
    object["beta_slow"] = rope.beta_slow;
    object["mscale"] = rope.mscale;
    object["mscale_all_dim"] = rope.mscale_all_dim;
  }
  return DumpJson(object);
}

void ScoreFinals(const TokenScorer& scorer, FinalCheck& finals) {
  if (scorer == nullptr) return;
  if (const absl::Status status = finals.Score(scorer); !status.ok())
    LogWarning("final states are not compared with their tokens: {}", MessageOf(status));
}

std::string ContentConflict(const ContentConfig& job, const ContentConfig& server) {
  const auto differs = [](std::string_view field, const auto& was, const auto& is) {
    return fmt::format(
        "{} was {} when the job was made and is {} now: start the server with the former one to go "
        "on, or submit the rest as a new job",
        field, was, is);
  };
  if (job.weight_digest != server.weight_digest)
    return differs("checkpoint (weight_digest)", job.weight_digest, server.weight_digest);
  if (job.tokenizer_digest != server.tokenizer_digest)
    return differs("tokenizer_digest", job.tokenizer_digest, server.tokenizer_digest);
  if (job.template_digest != server.template_digest)
    return differs("template_digest", job.template_digest, server.template_digest);
  if (job.dtype != server.dtype) return differs("dtype", job.dtype, server.dtype);
  if (job.inner_eps != server.inner_eps)
    return differs("inner_eps", job.inner_eps, server.inner_eps);
  if (!job.stop_ids.empty() && job.stop_ids != server.stop_ids)
    return differs("stop ids (eos_token_id)", job.stop_ids, server.stop_ids);
  return "";
}

}  // namespace statetap
