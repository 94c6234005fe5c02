#include "extractor/text/tokenizer.h"

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/text/bpe.h"
#include "extractor/text/special_tokens.h"
#include "extractor/text/split_pattern.h"
#include "extractor/text/utf8.h"
#include "extractor/text/vocabulary.h"

namespace statetap {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{64} << 20;
// The vendor cuts text into windows, and a window where a run of spaces or of non-spaces gets too
// long; the chunks are encoded one by one. Both in code points.
constexpr size_t kWindow = 400'000;
constexpr size_t kLongestRun = 25'000;

std::string DigestOf(const Vocabulary& vocabulary, const SpecialTokens& specials) {
  std::string content(SplitPattern::kVersion);
  for (int32_t rank = 0; rank < vocabulary.size(); ++rank)
    content += fmt::format("\n{} {}", vocabulary.BytesOf(rank).size(), vocabulary.BytesOf(rank));
  for (int i = 0; i < SpecialTokens::kCount; ++i)
    content += fmt::format("\n{}", specials.NameOf(vocabulary.size() + i));
  return Sha256Hex(content);
}

}  // namespace

struct Tokenizer::Impl {
  Vocabulary vocabulary;
  SpecialTokens specials;
  SplitPattern pattern;
  std::string digest;

  size_t ChunkEnd(std::string_view text, size_t begin, size_t* window_left) const;
  void EncodeOrdinary(std::string_view text, PairMerger& merger, std::vector<int32_t>* ids) const;
  void EncodeSpelled(std::string_view text, PairMerger& merger, std::vector<int32_t>* ids) const;
  template <typename EncodeChunk>
  absl::StatusOr<std::vector<int32_t>> EncodeChunks(std::string_view text,
                                                    EncodeChunk encode_chunk) const;
};

// `window_left` counts the code points left of the current window.
size_t Tokenizer::Impl::ChunkEnd(std::string_view text, size_t begin, size_t* window_left) const {
  size_t at = begin, run = 0;
  bool run_is_space = false;
  while (at < text.size() && *window_left > 0) {
    size_t next = at;
    const bool is_space = pattern.IsPythonSpace(DecodeUtf8(text, next));
    run = is_space == run_is_space ? run + 1 : 1;
    run_is_space = is_space;
    if (run > kLongestRun) return at;
    at = next;
    --*window_left;
  }
  *window_left = *window_left == 0 ? kWindow : *window_left;
  return at;
}

void Tokenizer::Impl::EncodeOrdinary(std::string_view text, PairMerger& merger,
                                     std::vector<int32_t>* ids) const {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = pattern.PieceEnd(text, begin);
    merger.Encode(text.substr(begin, end - begin), ids);
    begin = end;
  }
}

void Tokenizer::Impl::EncodeSpelled(std::string_view text, PairMerger& merger,
                                    std::vector<int32_t>* ids) const {
  for (size_t begin = 0; begin < text.size();) {
    const SpecialTokens::Match match = specials.Find(text, begin);
    EncodeOrdinary(text.substr(begin, match.begin - begin), merger, ids);
    if (match.begin < match.end) ids->push_back(match.id);
    begin = match.end;
  }
}

template <typename EncodeChunk>
absl::StatusOr<std::vector<int32_t>> Tokenizer::Impl::EncodeChunks(std::string_view text,
                                                                   EncodeChunk encode_chunk) const {
  STATETAP_RETURN_IF_ERROR(CheckUtf8(text));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3);
  PairMerger merger(vocabulary);
  size_t window_left = kWindow;
  for (size_t begin = 0; begin < text.size();) {
    // Text with fewer bytes than a run may have code points is one chunk.
    const size_t end =
        text.size() <= kLongestRun ? text.size() : ChunkEnd(text, begin, &window_left);
    encode_chunk(text.substr(begin, end - begin), merger, &ids);
    begin = end;
  }
  return ids;
}

absl::StatusOr<Tokenizer> Tokenizer::Open(const std::filesystem::path& folder) {
  const std::filesystem::path model_path = folder / "tiktoken.model";
  const std::filesystem::path config_path = folder / "tokenizer_config.json";
  STATETAP_ASSIGN_OR_RETURN(const std::string model, ReadWholeFile(model_path, kMaxFileBytes));
  STATETAP_ASSIGN_OR_RETURN(const std::string config, ReadWholeFile(config_path, kMaxFileBytes));

  absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Parse(model);
  if (!vocabulary.ok()) return WithContext(vocabulary.status(), model_path.string());
  absl::StatusOr<Json> parsed = ParseJson(config);
  if (!parsed.ok()) return WithContext(parsed.status(), config_path.string());
  absl::StatusOr<SpecialTokens> specials = SpecialTokens::Parse(*parsed, vocabulary->size());
  if (!specials.ok()) return WithContext(specials.status(), config_path.string());

  std::string digest = DigestOf(*vocabulary, *specials);
  return Tokenizer(std::make_unique<Impl>(*std::move(vocabulary), *std::move(specials),
                                          SplitPattern(), std::move(digest)));
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text) const {
  return impl_->EncodeChunks(text, [this](std::string_view chunk, PairMerger& merger, auto* ids) {
    impl_->EncodeOrdinary(chunk, merger, ids);
  });
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodeWithSpecials(std::string_view text) const {
  return impl_->EncodeChunks(text, [this](std::string_view chunk, PairMerger& merger, auto* ids) {
    impl_->EncodeSpelled(chunk, merger, ids);
  });
}

std::vector<int32_t> Tokenizer::SpecialsIn(std::string_view text) const {
  std::vector<int32_t> ids;
  for (size_t at = 0; at < text.size();) {
    const SpecialTokens::Match match = impl_->specials.Find(text, at);
    if (match.begin < match.end) ids.push_back(match.id);
    at = match.end;
  }
  return ids;
}

std::string Tokenizer::DecodeBytes(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (id >= 0 && id < impl_->vocabulary.size()) {
      bytes += impl_->vocabulary.BytesOf(id);
    } else if (impl_->specials.Contains(id)) {
      bytes += impl_->specials.NameOf(id);
    }
  }
  return bytes;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  return ReplaceInvalidUtf8(DecodeBytes(ids));
}

std::optional<int32_t> Tokenizer::SpecialId(std::string_view name) const {
  return impl_->specials.IdOf(name);
}
bool Tokenizer::IsSpecial(int32_t id) const { return impl_->specials.Contains(id); }
int32_t Tokenizer::first_special() const { return vocab() - SpecialTokens::kCount; }
int Tokenizer::vocab() const { return impl_->vocabulary.size() + SpecialTokens::kCount; }
const std::string& Tokenizer::digest() const { return impl_->digest; }

std::string StreamDecoder::Add(int32_t id) {
  pending_ += tokenizer_.DecodeBytes({&id, 1});
  const size_t complete = pending_.size() - IncompleteUtf8Tail(pending_);
  std::string text = ReplaceInvalidUtf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string StreamDecoder::Finish() {
  std::string text = ReplaceInvalidUtf8(pending_);
  pending_.clear();
  return text;
}

}  // namespace statetap
