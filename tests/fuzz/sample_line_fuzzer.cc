// A line of an input file: refused with a short message, or a sample whose chat is JSON still.
#include "client/lib/sample_line.h"
#include "extractor/base/json.h"
#include "extractor/text/utf8.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<ParsedLine> parsed = ParseSampleLine(line, "fuzz");
  if (!parsed.ok()) {
    fuzz::Require(absl::IsInvalidArgument(parsed.status()));
    fuzz::Require(parsed.status().message().size() < 2000);
    return 0;
  }
  const v1::SampleInput& sample = parsed->sample;
  fuzz::Require(sample.content_case() != v1::SampleInput::CONTENT_NOT_SET);
  fuzz::Require(CheckUtf8(sample.prompt()).ok() && CheckUtf8(sample.id()).ok());
  if (sample.has_chat()) {
    const absl::StatusOr<Json> messages = ParseJson(sample.chat().messages_json());
    fuzz::Require(messages.ok() && messages->is_array());
  }
  if (!sample.meta_json().empty()) fuzz::Require(ParseJson(sample.meta_json()).ok());
  return 0;
}
