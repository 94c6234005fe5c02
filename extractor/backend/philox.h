// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011): random numbers that are a function of a counter, the same on every backend.
#pragma once

#include <array>
#include <cstdint>

namespace statetap {

constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                             std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits, for the token at `position` of the sample `key` of a job with `seed`.
constexpr double UniformDraw(uint64_t seed, uint64_t key, uint64_t position) {
  const auto words =
      Philox4x32({static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                  static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>((uint64_t{words[0]} << 21) ^ (words[1] >> 11)) * 0x1p-53;
}

}  // namespace statetap
