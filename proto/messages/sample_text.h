// A sample of the contract as the model sees it: the server and `statetap tokens --model` make the
// same ids of it, for the same reasons refused. Pure functions; safe from many threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "extractor/text/chat_template.h"
#include "extractor/text/tokenizer.h"
#include "statetap/v1/jobs.pb.h"
#include "statetap/v1/model.pb.h"

namespace statetap {

// What text is made into ids for: tokenizer, template and ids of a checkpoint.
struct TextModel {
  const Tokenizer* tokenizer;
  TemplateKind kind = TemplateKind::kNone;  // where the options say auto
  int vocab = 0;
};

// Which answers of a chat become samples: see JobOptions.turns.
enum class Turns { kLast, kEach, kRegenerate };

// How a job's text becomes ids.
struct TextPlan {
  bool generate = true;
  Turns turns = Turns::kLast;
  RenderOptions render;
  SpelledSpecials assistant_specials = SpelledSpecials::kText;
  bool parse_special = false;  // of raw prompts
};

// INVALID_ARGUMENT names the field, the value and the remedy.
absl::StatusOr<TextPlan> PlanText(const v1::JobOptions& options, bool generate, TemplateKind kind);
// The plan's choices as options: every default of the text filled in.
void FillTextOptions(const TextPlan& plan, v1::JobOptions* options);

// Whether a job of such samples answers them, where options.mode does not say.
bool DefaultsToGenerate(const v1::SampleInput& sample, const v1::JobOptions& options);
// Whether a job with these options can be one that generates.
bool MayGenerate(const v1::JobOptions& options);

// Of text or ids, tools, thinking and sampling; not of id, source, split and meta.
uint64_t ContentHash(const v1::SampleInput& sample);
std::string ContentDigest(const v1::SampleInput& sample);  // 16 hex digits

struct TextRefusal {
  std::string reason;  // template, input or token_id
  std::optional<int64_t> token;
  std::string message;
};

struct SampleText {
  int turn = 0;      // with Turns::kEach which answer of the chat it ends with, from 1; else 0
  std::string text;  // for kShow
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;  // one a token; generate: zeros, the answer's ones come later
  TextCounts counts;
  std::optional<TextRefusal> refusal;
};
// kShow: whatever can be rendered. kJob: what gives a sample; a chat that holds the answer already,
// or none to learn from, or an image, is refused.
enum class TextPurpose { kShow, kJob };
// One, or with Turns::kEach one for each assistant message of a chat that has any, with the
// messages before it. No length limit is applied.
std::vector<SampleText> TextsOf(const v1::SampleInput& sample, const TextPlan& plan,
                                const TextModel& model, TextPurpose purpose);

// "q7/2": of the second answer of the chat "q7".
std::string IdOfTurn(const std::string& id, int turn);

// What Model.Render answers for a sample; options that cannot be are its error.
std::vector<v1::Rendered> RenderSample(const v1::SampleInput& sample, const v1::JobOptions& options,
                                       const TextModel& model);

}  // namespace statetap
