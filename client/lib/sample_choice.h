// Which lines `--sample N` takes: as many of each source as its share of the file asks for, chosen
// by a hash of seed and sample, so that 10 are among 100 and 100 among 25,000 of the same seed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "statetap/v1/jobs.pb.h"

namespace statetap {

class SampleChoice {
 public:
  explicit SampleChoice(uint64_t seed) : seed_(seed) {}
  // In the order of the lines. A sample is known by its id or, without one, by its content. A line
  // that repeats an id is the same sample again and is never chosen.
  void Add(const v1::SampleInput& sample);
  // [line] of those added: whether it is taken. All of them where there are fewer than `count`.
  // A source's samples stand at (k + 1/2) / n of the way, k by hash; the first `count` of all are
  // taken.
  std::vector<bool> Choose(int64_t count) const;

 private:
  struct Line {
    int64_t index;
    uint64_t hash;
  };
  uint64_t seed_;
  int64_t lines_ = 0;
  std::unordered_set<std::string> ids_;
  std::map<std::string, std::vector<Line>> by_source_;
};

}  // namespace statetap
