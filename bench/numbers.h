// Lists of numbers on a bench's command line.
#pragma once

#include <cstdlib>
#include <cstring>
#include <vector>

namespace statetap::bench {

// "1,16,64".
inline std::vector<int> Numbers(const char* text) {
  std::vector<int> numbers;
  for (const char* at = text; at != nullptr && *at != 0;) {
    numbers.push_back(std::atoi(at));
    at = std::strchr(at, ',');
    if (at != nullptr) ++at;
  }
  return numbers;
}

}  // namespace statetap::bench
