#include "client/cli/token_text.h"

#include "client/cli/text_width.h"

namespace statetap {
namespace {

class ServerTokenText : public TokenText {
 public:
  explicit ServerTokenText(Client& client) : client_(client) {}
  absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) override {
    std::vector<std::string> texts;
    const auto fill = [&](const Client::SendRender& send) {
      for (const std::vector<int32_t>& run : runs) {
        v1::RenderRequest request;
        request.mutable_options()->set_mode(v1::JOB_MODE_PREFILL);
        request.mutable_sample()->mutable_tokens()->mutable_ids()->Assign(run.begin(), run.end());
        if (!send(request)) return absl::AbortedError("the server ended the call");
      }
      return absl::OkStatus();
    };
    STATETAP_RETURN_IF_ERROR(client_.Render(fill, [&](const v1::Rendered& rendered) {
      texts.push_back(rendered.text());
      return rendered.error().empty() ? absl::OkStatus() : absl::InternalError(rendered.error());
    }));
    if (texts.size() != runs.size())
      return absl::InternalError("the server answered fewer texts than it was asked for");
    return texts;
  }

 private:
  Client& client_;
};

class ModelTokenText : public TokenText {
 public:
  explicit ModelTokenText(const LocalModel& model) : model_(model) {}
  absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) override {
    std::vector<std::string> texts;
    for (const auto& run : runs) texts.push_back(model_.tokenizer().Decode(run));
    return texts;
  }

 private:
  const LocalModel& model_;
};

// Line feeds stay, other control characters are made visible.
std::string PrintableLines(std::string_view text) {
  std::string safe;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    safe += Printable(text.substr(begin, end - begin));
    if (end < text.size()) safe += '\n';
    begin = end + 1;
  }
  return safe;
}

}  // namespace

std::unique_ptr<TokenText> TextFromServer(Client& client) {
  return std::make_unique<ServerTokenText>(client);
}
std::unique_ptr<TokenText> TextFromModel(const LocalModel& model) {
  return std::make_unique<ModelTokenText>(model);
}

std::vector<MaskRun> RunsOf(std::string_view loss_mask) {
  std::vector<MaskRun> runs;
  for (size_t t = 0; t < loss_mask.size(); ++t) {
    const bool supervised = loss_mask[t] != 0;
    if (runs.empty() || runs.back().supervised != supervised) runs.push_back({t, t, supervised});
    runs.back().end = t + 1;
  }
  return runs;
}

absl::StatusOr<std::string> MarkedText(TokenText& text, const std::vector<int32_t>& ids,
                                       std::string_view loss_mask, bool colour) {
  const std::vector<MaskRun> runs = RunsOf(loss_mask);
  std::vector<std::vector<int32_t>> parts;
  for (const MaskRun& run : runs)
    parts.emplace_back(ids.begin() + static_cast<ptrdiff_t>(run.begin),
                       ids.begin() + static_cast<ptrdiff_t>(run.end));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> texts, text.TextOf(parts));
  const std::string_view on = colour ? "\x1b[32m" : "⟦", off = colour ? "\x1b[0m" : "⟧";
  std::string marked;
  for (size_t r = 0; r < runs.size(); ++r) {
    const std::string part = PrintableLines(texts[r]);
    marked += runs[r].supervised ? fmt::format("{}{}{}", on, part, off) : part;
  }
  return marked;
}

}  // namespace statetap
