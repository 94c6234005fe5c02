// A sample's text for people: its supervised part marked, white space visible and ids beside the
// tokens where asked for, no wider than the terminal.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/token_text.h"

namespace statetap {

// Stretches of equal mask value.
struct MaskRun {
  size_t begin, end;
  bool supervised;
};
std::vector<MaskRun> RunsOf(std::string_view loss_mask);

struct MarkedTextStyle {
  // Supervised text is green, special tokens magenta, underlined where supervised. Without it
  // supervised text stands in ⟦ ⟧, and special tokens look like text.
  bool colour = false;
  // With colour: a token's background tells its log-probability. Text on one is white, underlined
  // where supervised.
  bool logprobs = false;
  bool ids = false;         // each token's id behind its text, in ‹ ›
  bool whitespace = false;  // see VisibleSpace; a line feed as ↵ before the break
  int width = 0;            // columns; 0: lines are as long as the text's
};

// `--ids` and `--whitespace`, as `tokens` and `view` have them.
struct MarkedTextFlags {
  bool ids = false;
  std::string whitespace;
};
void AddMarkedTextFlags(CLI::App& app, MarkedTextFlags& flags);
// White space is shown on a terminal unless the flags say otherwise.
MarkedTextStyle StyleFor(const Context& context, const MarkedTextFlags& flags);

// `logprobs`: one a token, NaN where not computed, or none at all.
absl::StatusOr<std::string> MarkedText(TokenText& text, const std::vector<int32_t>& ids,
                                       std::string_view loss_mask, std::span<const float> logprobs,
                                       const MarkedTextStyle& style);

// What the backgrounds mean, a line.
std::string LogprobLegend();

}  // namespace statetap
