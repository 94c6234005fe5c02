#include "extractor/checkpoint/vocab_map.h"

#include <fmt/format.h>

#include <cstring>
#include <vector>

namespace statetap {
namespace {

std::vector<int64_t> Int64s(std::span<const std::byte> bytes) {
  std::vector<int64_t> values(bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(int64_t));
  return values;
}

// The first place at which offsets stop naming ascending ids below `vocab`; none: their number.
size_t FirstBad(const std::vector<int64_t>& offsets, int64_t vocab) {
  int64_t last = -1;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const auto draft = static_cast<int64_t>(i);
    // Compared without adding: a stored number can be anything.
    if (offsets[i] <= last - draft || (vocab >= 0 && offsets[i] >= vocab - draft)) return i;
    last = draft + offsets[i];
  }
  return offsets.size();
}

bool AreTargetIds(const std::vector<int64_t>& values, int64_t vocab) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || (vocab >= 0 && values[i] >= vocab)) return false;
    if (i > 0 && values[i] <= values[i - 1]) return false;
  }
  return true;
}

// Whether d2t names ascending target ids.
bool CheckOffsets(const std::vector<int64_t>& offsets, int64_t vocab, RuleReport& report) {
  const size_t bad = FirstBad(offsets, vocab);
  RuleRow row{Verdict::kOk, "d2t values", fmt::format("{} offsets", offsets.size()),
              "ascending target ids", "target id = draft id + d2t[draft id]"};
  if (bad < offsets.size()) {
    row.verdict = Verdict::kFault;
    row.found = fmt::format("d2t[{}] = {}", bad, offsets[bad]);
    row.why = AreTargetIds(offsets, vocab)
                  ? "these look like target ids themselves: subtract 0, 1, 2, … from them"
                  : fmt::format("draft id + d2t has to ascend and stay below {}", vocab);
  }
  const bool ok = row.verdict == Verdict::kOk;
  report.Add(std::move(row));
  return ok;
}

bool CheckMembers(std::span<const std::byte> t2d, int64_t draft_vocab, RuleReport& report) {
  int64_t members = 0, odd = 0;
  for (const std::byte value : t2d) {
    members += value == std::byte{1};
    odd += value > std::byte{1};
  }
  RuleRow row{Verdict::kOk, "t2d values", fmt::format("{} true", members),
              fmt::format("{} true", draft_vocab), "one for each draft id"};
  if (odd > 0) {
    row.found += fmt::format(", {} neither 0 nor 1", odd);
    row.verdict = Verdict::kFault;
  } else if (draft_vocab >= 0 && members != draft_vocab) {
    row.verdict = Verdict::kFault;
  }
  const bool ok = row.verdict == Verdict::kOk;
  report.Add(std::move(row));
  return ok;
}

}  // namespace

void CheckVocabMap(std::span<const std::byte> d2t, std::span<const std::byte> t2d,
                   int64_t draft_vocab, int64_t vocab, RuleReport& report) {
  const std::vector<int64_t> offsets = Int64s(d2t);
  const bool good_offsets = !offsets.empty() && CheckOffsets(offsets, vocab, report);
  const bool good_members = !t2d.empty() && CheckMembers(t2d, draft_vocab, report);
  if (!good_offsets || !good_members) return;
  int64_t strangers = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const size_t target = i + static_cast<size_t>(offsets[i]);
    strangers += target >= t2d.size() || t2d[target] != std::byte{1};
  }
  report.Add({strangers == 0 ? Verdict::kOk : Verdict::kFault, "d2t and t2d",
              strangers == 0 ? "agree" : fmt::format("{} ids of d2t are not in t2d", strangers),
              "agree", "both describe the same choice of target ids"});
}

}  // namespace statetap
