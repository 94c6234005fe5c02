#include "client/cli/marked_text.h"

#include "client/cli/text_width.h"

namespace statetap {
namespace {

class Writer {
 public:
  explicit Writer(const MarkedTextStyle& style) : style_(style) {}

  void Mark(bool begins) {
    if (style_.colour) {
      out_ += begins ? "\x1b[32m" : "\x1b[39m";
    } else {
      Put(begins ? "⟦" : "⟧", 1);
    }
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
  int column_ = 0;
};

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
                                       std::string_view loss_mask, const MarkedTextStyle& style) {
  const std::vector<MaskRun> runs = RunsOf(loss_mask);
  std::vector<std::vector<int32_t>> parts;  // a run joined, or its tokens one by one
  for (const MaskRun& run : runs) {
    const size_t step = style.ids ? 1 : run.end - run.begin;
    for (size_t t = run.begin; t < run.end; t += step)
      parts.emplace_back(ids.begin() + static_cast<ptrdiff_t>(t),
                         ids.begin() + static_cast<ptrdiff_t>(t + step));
  }
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> texts, text.TextOf(parts));
  Writer writer(style);
  size_t part = 0;
  for (const MaskRun& run : runs) {
    if (run.supervised) writer.Mark(/*begins=*/true);
    for (size_t t = run.begin; t < run.end; t += parts[part++].size()) {
      writer.Text(texts[part]);
      if (style.ids) writer.Id(ids[t]);
    }
    if (run.supervised) writer.Mark(/*begins=*/false);
  }
  return writer.Take();
}

}  // namespace statetap
