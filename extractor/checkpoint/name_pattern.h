// Tensor names that differ in numbers alone, as one text.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace statetap {

// "model.layers.3.mlp.experts.17.up_proj" → "model.layers.*.mlp.experts.*.up_proj" and {3, 17}.
// Only whole parts of at most nine digits count as numbers.
struct NumberedName {
  std::string pattern;
  std::vector<int64_t> numbers;
};

inline NumberedName SplitNumbers(std::string_view name) {
  NumberedName split;
  while (true) {
    const size_t end = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, end);
    const bool number = !part.empty() && part.size() <= 9 &&
                        std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
    if (number) split.numbers.push_back(std::stoll(std::string(part)));
    split.pattern += number ? "*" : part;
    if (end == name.size()) return split;
    split.pattern += '.';
    name.remove_prefix(end + 1);
  }
}

// The least and the greatest of every number of names of one pattern.
class NumberRanges {
 public:
  void Add(const std::vector<int64_t>& numbers) {
    if (ranges_.empty()) {
      for (const int64_t number : numbers) ranges_.emplace_back(number, number);
    }
    for (size_t i = 0; i < ranges_.size(); ++i) {
      ranges_[i].first = std::min(ranges_[i].first, numbers[i]);
      ranges_[i].second = std::max(ranges_[i].second, numbers[i]);
    }
  }
  // "model.layers.{0..60}.mlp.gate.weight"
  std::string Text(std::string_view pattern) const {
    std::string text;
    size_t number = 0;
    for (const char c : pattern) {
      if (c != '*' || number == ranges_.size()) {
        text += c;
        continue;
      }
      const auto [least, greatest] = ranges_[number++];
      text +=
          least == greatest ? fmt::format("{}", least) : fmt::format("{{{}..{}}}", least, greatest);
    }
    return text;
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> ranges_;
};

}  // namespace statetap
