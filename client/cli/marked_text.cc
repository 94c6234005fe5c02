#include "client/cli/marked_text.h"

#include "client/cli/text_width.h"
#include "proto/messages/surprise.h"

namespace statetap {
namespace {

// By SurpriseOf, of the 256 colours: the more surprising, the redder. 0: none. The text on them is
// white, whatever the terminal's own colours are.
constexpr int kBackgrounds[] = {0, 58, 94, 88};
constexpr std::string_view kWhite = "38;5;231";

std::string OnBackground(std::string_view text, int background) {
  return fmt::format("\x1b[48;5;{};{}m{}\x1b[49;39m", background, kWhite, text);
}

class Writer {
 public:
  explicit Writer(const MarkedTextStyle& style) : style_(style) {}

  void Mark(bool begins) {
    supervised_ = begins;
    if (style_.colour) {
      Colour();
    } else {
      Put(begins ? "⟦" : "⟧", 1);
    }
  }

  void Background(int background) {
    if (background == background_) return;
    background_ = background;
    if (background != 0) {
      out_ += fmt::format("\x1b[48;5;{};{}{}m", background, kWhite, supervised_ ? ";4" : "");
    } else {
      out_ += "\x1b[49;24m";
      Colour();
    }
  }

  void Special(std::string_view text) {
    if (!style_.colour || background_ != 0) return Text(text);
    out_ += supervised_ ? "\x1b[35;4m" : "\x1b[35m";
    Text(text);
    if (supervised_) out_ += "\x1b[24m";
    Colour();
  }

  void Text(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
      const Character character = NextCharacter(text, at);
      if (character.bytes == "\n") {
        if (style_.whitespace) Dim("↵");
        out_ += '\n';
        column_ = 0;
        continue;
      }
      const std::string shown =
          style_.whitespace ? VisibleSpace(character.bytes) : Printable(character.bytes);
      if (shown == character.bytes) {
        Put(shown, character.width);
      } else {
        Dim(shown);
      }
    }
  }

  void Id(int32_t id) { Dim(fmt::format("‹{}›", id)); }

  std::string Take() { return std::move(out_); }

 private:
  void Colour() { out_ += supervised_ ? "\x1b[32m" : "\x1b[39m"; }

  void Dim(const std::string& text) {
    Break(DisplayWidth(text));
    if (style_.colour) out_ += "\x1b[2m";
    Put(text, DisplayWidth(text));
    if (style_.colour) out_ += "\x1b[22m";
  }

  void Put(std::string_view text, int width) {
    Break(width);
    out_ += text;
    column_ += width;
  }

  void Break(int width) {
    if (style_.width == 0 || column_ == 0 || column_ + width <= style_.width) return;
    out_ += '\n';
    column_ = 0;
  }

  const MarkedTextStyle& style_;
  std::string out_;
  int column_ = 0, background_ = 0;
  bool supervised_ = false;
};

// What is written at once: a special token, or text of one mask value and background, token by
// token with ids.
struct Part {
  size_t begin, end;
  bool special;
  int background;
};

std::vector<Part> PartsOf(const MaskRun& run, std::string_view special,
                          std::span<const int> backgrounds, bool ids) {
  std::vector<Part> parts;
  for (size_t t = run.begin; t < run.end; ++t) {
    const bool is_special = special[t] != 0;
    if (ids || is_special || parts.empty() || parts.back().special ||
        parts.back().background != backgrounds[t])
      parts.push_back({t, t, is_special, backgrounds[t]});
    parts.back().end = t + 1;
  }
  return parts;
}

}  // namespace

std::vector<MaskRun> RunsOf(std::string_view loss_mask) {
  std::vector<MaskRun> runs;
  for (size_t t = 0; t < loss_mask.size(); ++t) {
    const bool supervised = loss_mask[t] != 0;
    if (runs.empty() || runs.back().supervised != supervised) runs.push_back({t, t, supervised});
    runs.back().end = t + 1;
  }
  return runs;
}

void AddMarkedTextFlags(CLI::App& app, MarkedTextFlags& flags) {
  app.add_flag("--ids", flags.ids, "Each token's id behind its text");
  app.add_option("--whitespace", flags.whitespace,
                 "Show spaces as ·, tabs as → and line feeds as ↵, on or off [on at a terminal]")
      ->check(CLI::IsMember({"on", "off"}));
}

MarkedTextStyle StyleFor(const Context& context, const MarkedTextFlags& flags) {
  return {.colour = context.terminal.out,
          .ids = flags.ids,
          .whitespace = flags.whitespace.empty() ? context.terminal.out : flags.whitespace == "on",
          .width = context.table_width()};
}

absl::StatusOr<std::string> MarkedText(TokenText& text, const std::vector<int32_t>& ids,
                                       std::string_view loss_mask, std::span<const float> logprobs,
                                       const MarkedTextStyle& style) {
  std::vector<int> backgrounds(ids.size());
  if (style.colour && style.logprobs && logprobs.size() == ids.size())
    for (size_t t = 0; t < ids.size(); ++t) backgrounds[t] = kBackgrounds[SurpriseOf(logprobs[t])];
  std::string special;
  if (style.colour) {
    STATETAP_ASSIGN_OR_RETURN(special, text.SpecialsOf(ids));
  }
  special.resize(ids.size());  // an older server does not say
  std::vector<std::vector<Part>> runs;
  std::vector<std::vector<int32_t>> pieces;
  const std::vector<MaskRun> masked = RunsOf(loss_mask);
  for (const MaskRun& run : masked) {
    runs.push_back(PartsOf(run, special, backgrounds, style.ids));
    for (const Part& part : runs.back())
      pieces.emplace_back(ids.begin() + static_cast<ptrdiff_t>(part.begin),
                          ids.begin() + static_cast<ptrdiff_t>(part.end));
  }
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> texts, text.TextOf(pieces));
  Writer writer(style);
  auto next = texts.begin();
  for (size_t run = 0; run < runs.size(); ++run) {
    if (masked[run].supervised) writer.Mark(/*begins=*/true);
    for (const Part& part : runs[run]) {
      writer.Background(part.background);
      part.special ? writer.Special(*next) : writer.Text(*next);
      ++next;
      if (style.ids) writer.Id(ids[part.begin]);
    }
    writer.Background(0);
    if (masked[run].supervised) writer.Mark(/*begins=*/false);
  }
  return writer.Take();
}

std::string LogprobLegend() {
  return fmt::format("probability of a token: {}, {}, {}, others half or more",
                     OnBackground(" below 1 % ", kBackgrounds[3]),
                     OnBackground(" below 10 % ", kBackgrounds[2]),
                     OnBackground(" below 50 % ", kBackgrounds[1]));
}

}  // namespace statetap
