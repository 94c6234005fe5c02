// Names and constants of the shard format, version 1. docs/shard-format.md says what they mean.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace statetap {

inline constexpr std::string_view kShardFormat = "statetap-shard";
inline constexpr int64_t kShardVersion = 1;
inline constexpr std::string_view kShardEnding = ".h5";
inline constexpr std::string_view kPartialEnding = ".partial";

inline constexpr int64_t kChunkAlignment = 4096;  // bytes: start and size of every chunk
inline constexpr int64_t kStatesChunkBytes = int64_t{1} << 20;
inline constexpr int64_t kTokensRowsPerChunk = 16384;  // 64 KiB of ids, 16 KiB of mask

inline constexpr std::string_view kStatesGroup = "/states";
inline constexpr std::string_view kTokensGroup = "/tokens";
inline constexpr std::string_view kSamplesGroup = "/samples";
inline constexpr std::string_view kStatsGroup = "/stats";

inline constexpr std::string_view kScalesGroup = "/scales";  // fp8 alone

inline constexpr std::string_view kTokenIds = "/tokens/ids";
inline constexpr std::string_view kTokenLossMask = "/tokens/loss_mask";
inline constexpr std::string_view kTokenLogprob = "/tokens/logprob";
inline constexpr std::string_view kTokenEntropy = "/tokens/entropy";

inline std::string StatesPath(int boundary) { return fmt::format("/states/{}", boundary); }
inline std::string ScalesPath(int boundary) { return fmt::format("/scales/{}", boundary); }
inline std::string StatsPath(int boundary, std::string_view name) {
  return fmt::format("/stats/{}/{}", boundary, name);
}

// Bounds that a reader checks before it allocates.
inline constexpr int kMaxHidden = 1 << 20;
inline constexpr int kMaxBoundaries = 4096;

}  // namespace statetap
