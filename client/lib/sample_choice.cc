#include "client/lib/sample_choice.h"

#include <algorithm>
#include <span>
#include <tuple>

#include "extractor/base/digest.h"

namespace statetap {

void SampleChoice::Add(const v1::SampleInput& sample) {
  std::string key = sample.id();
  if (key.empty()) {
    v1::SampleInput content = sample;
    content.clear_source_line();
    key = content.SerializeAsString();
  }
  Xxh3 hash;
  hash.Update(std::as_bytes(std::span(&seed_, 1)));
  hash.Update(std::as_bytes(std::span(key)));
  const int64_t line = lines_++;
  if (!sample.id().empty() && !ids_.insert(sample.id()).second) return;
  by_source_[sample.source()].push_back({line, hash.Digest()});
}

std::vector<bool> SampleChoice::Choose(int64_t count) const {
  struct Place {
    double position;
    uint64_t hash;
    int64_t index;
  };
  std::vector<Place> places;
  for (const auto& [source, lines] : by_source_) {
    std::vector<Line> sorted = lines;
    const auto by_hash = [](const Line& a, const Line& b) {
      return std::tie(a.hash, a.index) < std::tie(b.hash, b.index);
    };
    std::sort(sorted.begin(), sorted.end(), by_hash);
    for (size_t k = 0; k < sorted.size(); ++k) {
      const double position = (static_cast<double>(k) + 0.5) / static_cast<double>(sorted.size());
      places.push_back({position, sorted[k].hash, sorted[k].index});
    }
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.position, a.hash, a.index) < std::tie(b.position, b.hash, b.index);
  });
  if (count < static_cast<int64_t>(places.size())) places.resize(static_cast<size_t>(count));
  std::vector<bool> chosen(static_cast<size_t>(lines_), false);
  for (const Place& place : places) chosen[static_cast<size_t>(place.index)] = true;
  return chosen;
}

}  // namespace statetap
