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

absl::Status AppendText(const Tokenizer& tokenizer, std::string_view text, EncodedText* to) {
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text));
  to->ids.insert(to->ids.end(), ids.begin(), ids.end());
  return absl::OkStatus();
}

// The segments from `begin` on that are one stretch of text under one mask.
size_t StretchEnd(std::span<const Segment> segments, size_t begin) {
  size_t end = begin + 1;
  while (end < segments.size() && segments[end].kind == Kind::kText &&
         segments[end].supervised == segments[begin].supervised)
    ++end;
  return end;
}

}  // namespace

absl::StatusOr<EncodedText> EncodeSegments(const Tokenizer& tokenizer,
                                           std::span<const Segment> segments) {
  EncodedText encoded;
  for (size_t begin = 0; begin < segments.size();) {
    const Segment& segment = segments[begin];
    size_t end = begin + 1;
    if (segment.kind == Kind::kSpecial) {
      STATETAP_RETURN_IF_ERROR(AppendSpecial(tokenizer, segment, &encoded));
    } else {
      end = StretchEnd(segments, begin);
      STATETAP_RETURN_IF_ERROR(
          AppendText(tokenizer, TextOf(segments.subspan(begin, end - begin)), &encoded));
    }
    encoded.loss_mask.resize(encoded.ids.size(), segment.supervised ? 1 : 0);
    begin = end;
  }
  return encoded;
}

}  // namespace statetap
