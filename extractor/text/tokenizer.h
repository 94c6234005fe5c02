// Byte-level BPE from a tiktoken.model, with Kimi's split pattern (Unicode 16, as tiktoken 0.14);
// special tokens from tokenizer_config.json. Immutable after Open; safe from many threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "extractor/base/status.h"

namespace statetap {

class Tokenizer {
 public:
  // Reads `folder`/tiktoken.model and `folder`/tokenizer_config.json. Ranks are 0…n−1; the 256 ids
  // behind them are special, named by added_tokens_decoder or "<|reserved_token_ID|>". Errors name
  // the file and the line.
  static absl::StatusOr<Tokenizer> Open(const std::filesystem::path& folder);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Ids of ordinary text: text that spells a special token stays text. INVALID_ARGUMENT with the
  // byte offset for invalid UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text) const;
  // The same, but text that spells a special token becomes it, as the vendor's encode does. For raw
  // prompts and answers, and only where a person chose it: never for what users or tools wrote.
  absl::StatusOr<std::vector<int32_t>> EncodeWithSpecials(std::string_view text) const;
  // The special tokens that `text` spells, in order.
  std::vector<int32_t> SpecialsIn(std::string_view text) const;
  // The tokens' bytes joined; a special token gives its name. Ids outside the vocabulary give
  // nothing and are the caller's fault.
  std::string DecodeBytes(std::span<const int32_t> ids) const;
  // DecodeBytes with U+FFFD for each maximal invalid subpart.
  std::string Decode(std::span<const int32_t> ids) const;

  std::optional<int32_t> SpecialId(std::string_view name) const;
  bool IsSpecial(int32_t id) const;
  int32_t first_special() const;  // the ids from here to vocab() are special
  int vocab() const;              // ranks and specials
  // SHA-256 over ranks, specials and the split pattern's version.
  const std::string& digest() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Text of ids that come one by one; never half a character.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The text that became complete with this token, perhaps empty.
  std::string Add(int32_t id);
  // What is left, incomplete characters as U+FFFD.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

}  // namespace statetap
