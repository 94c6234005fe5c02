#include "extractor/text/vocabulary.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

namespace statetap {
namespace {

constexpr int kMaxRanks = 1 << 24;  // a bound for hostile files; real ones have 163,584

constexpr std::array<int8_t, 256> MakeBase64Values() {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kAlphabet.size(); ++i)
    values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
  return values;
}
constexpr std::array<int8_t, 256> kBase64Values = MakeBase64Values();

// Appends the decoded bytes; false for anything but padded standard base64.
bool AppendBase64(std::string_view text, std::string* bytes) {
  if (text.empty() || text.size() % 4 != 0) return false;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  const size_t digits = text.size() - padding;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const int8_t value = i < digits ? kBase64Values[static_cast<uint8_t>(text[i])] : int8_t{0};
    if (value < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) bytes->push_back(static_cast<char>(bits >> shift));
    bits = 0;
  }
  bytes->resize(bytes->size() - padding);
  return true;
}

uint64_t Load(const char* from, size_t size) {
  uint64_t word = 0;
  std::memcpy(&word, from, size);
  return word;
}

// Up to eight bytes as one word, without a loop: overlapping loads.
uint64_t LoadShort(const char* from, size_t size) {
  if (size == 8) return Load(from, 8);
  if (size >= 4) return Load(from, 4) | Load(from + size - 4, 4) << 32;
  if (size == 0) return 0;
  const auto byte = [&](size_t i) { return uint64_t{static_cast<uint8_t>(from[i])}; };
  return byte(0) | byte(size / 2) << 8 | byte(size - 1) << 16;
}

uint64_t HashOf(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;
  const char* at = bytes.data();
  size_t left = bytes.size();
  uint64_t hash = left * kMultiplier;
  for (; left > 8; at += 8, left -= 8) hash = (std::rotl(hash, 23) ^ Load(at, 8)) * kMultiplier;
  hash = (std::rotl(hash, 23) ^ LoadShort(at, left)) * kMultiplier;
  return hash ^ hash >> 29;
}

}  // namespace

absl::StatusOr<Vocabulary> Vocabulary::Parse(std::string_view content) {
  Vocabulary vocabulary;
  vocabulary.bytes_.reserve(content.size() / 2);
  for (int64_t line_number = 1; !content.empty(); ++line_number) {
    std::string_view line = content.substr(0, content.find('\n'));
    content.remove_prefix(std::min(content.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    if (const absl::Status added = vocabulary.Add(line); !added.ok())
      return WithContext(added, fmt::format("line {}", line_number));
  }
  STATETAP_RETURN_IF_ERROR(vocabulary.BuildTable());
  STATETAP_RETURN_IF_ERROR(vocabulary.CheckSingleBytes());
  return vocabulary;
}

absl::Status Vocabulary::Add(std::string_view line) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos)
    return absl::InvalidArgumentError("no space between the token's base64 and its rank");
  int64_t rank = -1;
  const std::string_view digits = line.substr(space + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size())
    return absl::InvalidArgumentError("the rank is not a decimal number");
  if (rank != size() || rank >= kMaxRanks)
    return absl::InvalidArgumentError(
        fmt::format("rank {} found where {} is expected; ranks count upwards from 0 to at most {}",
                    rank, size(), kMaxRanks - 1));
  if (!AppendBase64(line.substr(0, space), &bytes_))
    return absl::InvalidArgumentError("the token is not padded base64");
  if (bytes_.size() > UINT32_MAX) return absl::InvalidArgumentError("tokens of 4 GiB and more");
  longest_ = std::max(longest_, bytes_.size() - offsets_.back());
  offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  return absl::OkStatus();
}

absl::Status Vocabulary::BuildTable() {
  two_bytes_.assign(1 << 16, kNoRank);
  slots_.resize(std::bit_ceil(2 * static_cast<size_t>(size()) + 1));
  for (int32_t rank = 0; rank < size(); ++rank) {
    const std::string_view bytes = BytesOf(rank);
    if (bytes.size() == 2) two_bytes_[PairIndex(bytes[0], bytes[1])] = rank;
    const uint64_t hash = HashOf(bytes);
    Slot& slot = slots_[SlotOf(bytes, hash)];
    if (slot.rank != kNoRank)
      return absl::InvalidArgumentError(
          fmt::format("ranks {} and {} are the same bytes", slot.rank, rank));
    slot = {static_cast<uint32_t>(hash >> 32), rank};
  }
  return absl::OkStatus();
}

absl::Status Vocabulary::CheckSingleBytes() const {
  for (int value = 0; value < 256; ++value) {
    const char byte = static_cast<char>(value);
    if (RankOf({&byte, 1}) == kNoRank)
      return absl::InvalidArgumentError(fmt::format(
          "no token for the single byte 0x{:02x}: not a whole byte-level vocabulary", value));
  }
  return absl::OkStatus();
}

// Where `bytes` is, or the empty slot where it would go.
size_t Vocabulary::SlotOf(std::string_view bytes, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t at = hash & mask;
  while (slots_[at].rank != kNoRank && (slots_[at].tag != tag || BytesOf(slots_[at].rank) != bytes))
    at = (at + 1) & mask;
  return at;
}

int32_t Vocabulary::RankOf(std::string_view bytes) const {
  if (bytes.size() > longest_) return kNoRank;
  return slots_[SlotOf(bytes, HashOf(bytes))].rank;
}

}  // namespace statetap
