// From segments to ids and their loss mask.
#include "extractor/text/chat_template.h"

namespace statetap {
namespace {

using Kind = Segment::Kind;

absl::Status AppendSpecial(const Tokenizer& tokenizer, const Segment& segment, EncodedText* to) {
  const std::optional<int32_t> id = tokenizer.SpecialId(segment.text);
  if (!id)
    return absl::InvalidArgumentError(
        fmt::format("the tokenizer names no special token \"{}\", which the template needs; choose "
                    "another template",
                    segment.text));
  to->ids.push_back(*id);
  return absl::OkStatus();
}

absl::Status AppendText(const Tokenizer& tokenizer, std::span<const Segment> stretch,
                        SpelledSpecials spelled, EncodedText* to) {
  for (const Segment& segment : stretch) {
    if (segment.kind != Kind::kAnswer) continue;
    const std::vector<int32_t> specials = tokenizer.SpecialsIn(segment.text);
    to->spelled_specials += static_cast<int64_t>(specials.size());
    if (!specials.empty() && spelled == SpelledSpecials::kRefused)
      return absl::InvalidArgumentError(fmt::format(
          "an assistant's text spells the special token \"{}\"; mend the text, or take what "
          "assistants spell as text or as tokens",
          tokenizer.DecodeBytes({specials.data(), 1})));
  }
  const bool parsed = spelled == SpelledSpecials::kParsed && stretch[0].kind == Kind::kAnswer;
  const std::string text = TextOf(stretch);
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            parsed ? tokenizer.EncodeWithSpecials(text) : tokenizer.Encode(text));
  to->ids.insert(to->ids.end(), ids.begin(), ids.end());
  return absl::OkStatus();
}

// The segments from `begin` on that are one stretch of text under one mask and one rule.
size_t StretchEnd(std::span<const Segment> segments, size_t begin, SpelledSpecials spelled) {
  size_t end = begin + 1;
  while (end < segments.size() && segments[end].kind != Kind::kSpecial &&
         segments[end].supervised == segments[begin].supervised &&
         (spelled != SpelledSpecials::kParsed || segments[end].kind == segments[begin].kind))
    ++end;
  return end;
}

}  // namespace

absl::StatusOr<EncodedText> EncodeSegments(const Tokenizer& tokenizer,
                                           std::span<const Segment> segments,
                                           SpelledSpecials spelled) {
  EncodedText encoded;
  for (size_t begin = 0; begin < segments.size();) {
    const Segment& segment = segments[begin];
    size_t end = begin + 1;
    if (segment.kind == Kind::kSpecial) {
      STATETAP_RETURN_IF_ERROR(AppendSpecial(tokenizer, segment, &encoded));
    } else {
      end = StretchEnd(segments, begin, spelled);
      STATETAP_RETURN_IF_ERROR(
          AppendText(tokenizer, segments.subspan(begin, end - begin), spelled, &encoded));
    }
    encoded.loss_mask.resize(encoded.ids.size(), segment.supervised ? 1 : 0);
    begin = end;
  }
  return encoded;
}

}  // namespace statetap
