// UTF-8 and the tokenizer behind it: text is refused or comes back byte for byte, whole and
// streamed; special tokens appear only where they are asked for.
#include "extractor/text/utf8.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Tokenizer& tokenizer = fuzz::TinyKimi();
  const bool valid = CheckUtf8(bytes).ok();
  const std::string replaced = ReplaceInvalidUtf8(bytes);
  fuzz::Require(CheckUtf8(replaced).ok());
  fuzz::Require(valid == (replaced == bytes));
  fuzz::Require(IncompleteUtf8Tail(bytes) <= std::min<size_t>(3, size));

  const auto ids = tokenizer.Encode(bytes), with_specials = tokenizer.EncodeWithSpecials(bytes);
  fuzz::Require(ids.ok() == valid && with_specials.ok() == valid);
  if (!valid) return 0;
  fuzz::Require(tokenizer.DecodeBytes(*ids) == bytes);
  fuzz::Require(tokenizer.DecodeBytes(*with_specials) == bytes);
  StreamDecoder stream(tokenizer);
  std::string streamed;
  for (const int32_t id : *ids) {
    fuzz::Require(!tokenizer.IsSpecial(id));
    const std::string text = stream.Add(id);
    fuzz::Require(CheckUtf8(text).ok());
    streamed += text;
  }
  fuzz::Require(streamed + stream.Finish() == bytes);
  return 0;
}
