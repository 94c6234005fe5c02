#include "client/lib/local_model.h"

#include <algorithm>
#include <span>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

absl::StatusOr<RenderOptions> OptionsOf(const v1::JobOptions& options,
                                        const v1::SampleInput& sample, TemplateKind detected) {
  RenderOptions render;
  const bool generate = options.mode() != v1::JOB_MODE_PREFILL;
  render.kind = detected;
  if (!options.template_().empty() && options.template_() != "auto") {
    STATETAP_ASSIGN_OR_RETURN(render.kind, ParseTemplateKind(options.template_()));
  }
  render.keep_reasoning = generate ? KeepReasoning::kToolLoop : KeepReasoning::kLast;
  if (!options.keep_reasoning().empty()) {
    STATETAP_ASSIGN_OR_RETURN(render.keep_reasoning, ParseKeepReasoning(options.keep_reasoning()));
  }
  render.thinking = options.has_thinking() ? options.thinking() : true;
  if (sample.has_thinking()) render.thinking = sample.thinking();
  render.generation_prompt = generate;
  render.supervise_last = !generate;
  return render;
}

struct Content {
  std::string text;
  EncodedText encoded;
};

absl::StatusOr<Content> ContentOfChat(const v1::ChatText& chat, const RenderOptions& options,
                                      const Tokenizer& tokenizer) {
  STATETAP_ASSIGN_OR_RETURN(const Json messages, ParseJson(chat.messages_json()));
  Json tools;
  if (!chat.tools_json().empty()) {
    STATETAP_ASSIGN_OR_RETURN(tools, ParseJson(chat.tools_json()));
  }
  STATETAP_RETURN_IF_ERROR(CheckTextOnly(messages));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<Segment> segments,
                            RenderChat(messages, tools.is_null() ? nullptr : &tools, options));
  Content content{.text = TextOf(segments)};
  STATETAP_ASSIGN_OR_RETURN(content.encoded, EncodeSegments(tokenizer, segments));
  return content;
}

absl::StatusOr<Content> ContentOfPrompt(const std::string& prompt, const Tokenizer& tokenizer) {
  Content content{.text = prompt};
  STATETAP_ASSIGN_OR_RETURN(content.encoded.ids, tokenizer.Encode(prompt));
  content.encoded.loss_mask.assign(content.encoded.ids.size(), 1);
  return content;
}

absl::StatusOr<Content> ContentOfTokens(const v1::TokenIds& tokens, const Tokenizer& tokenizer) {
  Content content;
  for (int i = 0; i < tokens.ids_size(); ++i) {
    if (tokens.ids(i) < 0 || tokens.ids(i) >= tokenizer.vocab())
      return absl::InvalidArgumentError(fmt::format(
          "input_ids[{}] is {}; the vocabulary has {} ids", i, tokens.ids(i), tokenizer.vocab()));
  }
  content.encoded.ids.assign(tokens.ids().begin(), tokens.ids().end());
  content.encoded.loss_mask.assign(tokens.loss_mask().begin(), tokens.loss_mask().end());
  if (content.encoded.loss_mask.empty())
    content.encoded.loss_mask.assign(content.encoded.ids.size(), 1);
  content.text = tokenizer.Decode(content.encoded.ids);
  return content;
}

absl::StatusOr<Content> ContentOf(const v1::SampleInput& sample, const RenderOptions& options,
                                  const Tokenizer& tokenizer) {
  if (sample.has_chat()) return ContentOfChat(sample.chat(), options, tokenizer);
  if (sample.has_tokens()) return ContentOfTokens(sample.tokens(), tokenizer);
  return ContentOfPrompt(sample.prompt(), tokenizer);
}

// A missing id is the content's digest, as the server makes it.
std::string IdOf(const v1::SampleInput& sample) {
  if (!sample.id().empty()) return sample.id();
  v1::SampleInput content = sample;
  content.clear_source();
  content.clear_meta_json();
  content.clear_source_line();
  const std::string bytes = content.SerializeAsString();
  return HexOf(Xxh3Of(std::as_bytes(std::span(bytes))));
}

}  // namespace

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

absl::StatusOr<v1::Rendered> LocalModel::Render(const v1::JobOptions& options,
                                                const v1::SampleInput& sample) const {
  STATETAP_ASSIGN_OR_RETURN(const RenderOptions render, OptionsOf(options, sample, kind_));
  v1::Rendered rendered;
  rendered.set_id(IdOf(sample));
  const absl::StatusOr<Content> content = ContentOf(sample, render, *tokenizer_);
  if (!content.ok()) {
    rendered.set_error(std::string(MessageOf(content.status())));
    return rendered;
  }
  rendered.set_text(content->text);
  const EncodedText& encoded = content->encoded;
  rendered.mutable_input_ids()->Assign(encoded.ids.begin(), encoded.ids.end());
  std::string& mask = *rendered.mutable_loss_mask();
  mask.assign(encoded.loss_mask.begin(), encoded.loss_mask.end());
  // The answer to come is what is learned from; nothing that is there yet.
  if (options.mode() != v1::JOB_MODE_PREFILL) std::fill(mask.begin(), mask.end(), '\0');
  return rendered;
}

}  // namespace statetap
