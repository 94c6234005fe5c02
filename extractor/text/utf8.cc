#include "extractor/text/utf8.h"

#include <algorithm>
#include <cstring>

namespace statetap {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// What may follow a lead byte: the whole length (0: no lead byte) and the second byte's range.
struct LeadRule {
  size_t size;
  uint8_t low = 0x80, high = 0xbf;
};

LeadRule RuleOf(uint8_t lead) {
  if (lead < 0x80) return {1};
  if (lead < 0xc2) return {0};
  if (lead < 0xe0) return {2};
  if (lead == 0xe0) return {3, 0xa0, 0xbf};
  if (lead == 0xed) return {3, 0x80, 0x9f};
  if (lead < 0xf0) return {3};
  if (lead == 0xf0) return {4, 0x90, 0xbf};
  if (lead < 0xf4) return {4};
  if (lead == 0xf4) return {4, 0x80, 0x8f};
  return {0};
}

// Prose is mostly ASCII: eight bytes at a time.
size_t SkipAscii(std::string_view bytes, size_t at) {
  uint64_t word = 0;
  while (at + sizeof word <= bytes.size()) {
    std::memcpy(&word, bytes.data() + at, sizeof word);
    if ((word & 0x8080808080808080u) != 0) break;
    at += sizeof word;
  }
  while (at < bytes.size() && static_cast<uint8_t>(bytes[at]) < 0x80) ++at;
  return at;
}

size_t FirstInvalid(std::string_view bytes, size_t at) {
  while ((at = SkipAscii(bytes, at)) < bytes.size()) {
    const Utf8Sequence sequence = ScanUtf8(bytes.substr(at));
    if (!sequence.complete) break;
    at += sequence.size;
  }
  return at;
}

}  // namespace

Utf8Sequence ScanUtf8(std::string_view bytes) {
  const LeadRule rule = RuleOf(static_cast<uint8_t>(bytes[0]));
  if (rule.size == 0) return {1, false, false};
  uint8_t low = rule.low, high = rule.high;
  for (size_t i = 1; i < rule.size; ++i) {
    if (i == bytes.size()) return {i, false, true};
    const auto byte = static_cast<uint8_t>(bytes[i]);
    if (byte < low || byte > high) return {i, false, false};
    low = 0x80;
    high = 0xbf;
  }
  return {rule.size, true, false};
}

absl::Status CheckUtf8(std::string_view text) {
  const size_t at = FirstInvalid(text, 0);
  if (at == text.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("not valid UTF-8: byte 0x{:02x} at byte offset {}; convert the text to UTF-8",
                  static_cast<uint8_t>(text[at]), at));
}

std::string ReplaceInvalidUtf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    const size_t end = FirstInvalid(bytes, at);
    text += bytes.substr(at, end - at);
    if (end == bytes.size()) break;
    text += kReplacement;
    at = end + ScanUtf8(bytes.substr(end)).size;
  }
  return text;
}

size_t IncompleteUtf8Tail(std::string_view bytes) {
  for (size_t length = std::min<size_t>(3, bytes.size()); length > 0; --length) {
    const Utf8Sequence sequence = ScanUtf8(bytes.substr(bytes.size() - length));
    if (sequence.ends_early && sequence.size == length) return length;
  }
  return 0;
}

}  // namespace statetap
