// The maps between a drafter's vocabulary and the target's: d2t (offsets) and t2d (members).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "extractor/checkpoint/rule_report.h"

namespace statetap {

// Draft ids are the chosen target ids in ascending order, d2t[i] + i is the i-th of them, and
// t2d[v] is true for exactly these. Adds a row for d2t's values, one for t2d's and one for their
// agreement. `d2t`: int64 values, `t2d`: a byte a target id, as stored; either may be empty (not
// there or not readable). Sizes below 0 are not known.
void CheckVocabMap(std::span<const std::byte> d2t, std::span<const std::byte> t2d,
                   int64_t draft_vocab, int64_t vocab, RuleReport& report);

}  // namespace statetap
