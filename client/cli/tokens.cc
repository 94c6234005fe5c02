// tokens: what the model would see of each line.
#include <algorithm>

#include "client/cli/commands.h"
#include "client/cli/input_faults.h"
#include "client/cli/job_flags.h"
#include "client/cli/marked_text.h"
#include "client/cli/text_width.h"
#include "client/cli/token_text.h"
#include "client/lib/input_files.h"
#include "client/lib/proto_json.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

struct TokensFlags {
  std::vector<std::string> files;
  JobFlags job;
  std::string model;
  MarkedTextFlags text;
  bool skip_bad = false;
};

using OnRendered = std::function<absl::Status(const v1::Rendered&)>;

absl::Status RenderHere(const LocalModel& model, const InputFiles& files,
                        const v1::JobOptions& options, const OnRendered& on_rendered) {
  return files.ForEach(
      [&](InputLine line) -> absl::Status {
        if (!line.parsed.ok()) return absl::OkStatus();
        STATETAP_ASSIGN_OR_RETURN(const std::vector<v1::Rendered> rendered,
                                  model.Render(options, line.parsed->sample));
        for (const v1::Rendered& one : rendered) STATETAP_RETURN_IF_ERROR(on_rendered(one));
        return absl::OkStatus();
      },
      nullptr);
}

// The whole of the input goes through one stream; `send` blocks while the server is busy.
absl::Status RenderThere(Client& client, const InputFiles& files, const v1::JobOptions& options,
                         const OnRendered& on_rendered) {
  const auto fill = [&](const Client::SendRender& send) {
    return files.ForEach(
        [&](InputLine line) -> absl::Status {
          if (!line.parsed.ok()) return absl::OkStatus();
          v1::RenderRequest request;
          *request.mutable_options() = options;
          *request.mutable_sample() = std::move(line.parsed->sample);
          return send(request) ? absl::OkStatus() : absl::AbortedError("the server ended the call");
        },
        nullptr);
  };
  return client.Render(fill, on_rendered);
}

class Printer {
 public:
  Printer(Context& context, TokenText& text, const MarkedTextStyle& style)
      : context_(context), text_(text), style_(style) {}

  absl::Status Print(const v1::Rendered& rendered) {
    if (context_.interrupted()) return absl::CancelledError("interrupted");
    refused_ += rendered.error().empty() ? 0 : 1;
    if (context_.json) {
      PrintJson(rendered);
      return absl::OkStatus();
    }
    if (!rendered.error().empty()) {
      context_.out << fmt::format("── {}: refused: {}\n\n", Printable(rendered.id()),
                                  Printable(rendered.error()));
      return absl::OkStatus();
    }
    return PrintText(rendered);
  }
  int64_t refused() const { return refused_; }

 private:
  void PrintJson(const v1::Rendered& rendered) {
    if (!rendered.error().empty())
      return context_.PrintJson({{"id", rendered.id()}, {"error", rendered.error()}});
    Json json = JsonOf(rendered);
    json.erase("error");
    json.erase("special");
    context_.PrintJson(json);
  }

  absl::Status PrintText(const v1::Rendered& rendered) {
    const std::vector<int32_t> ids(rendered.input_ids().begin(), rendered.input_ids().end());
    const auto supervised =
        std::count(rendered.loss_mask().begin(), rendered.loss_mask().end(), '\1');
    STATETAP_ASSIGN_OR_RETURN(const std::string marked,
                              MarkedText(text_, ids, rendered.loss_mask(), {}, style_));
    context_.out << fmt::format("── {}: {} tokens, {} supervised\n{}\n\n", Printable(rendered.id()),
                                ids.size(), supervised, marked);
    return absl::OkStatus();
  }

  Context& context_;
  TokenText& text_;
  const MarkedTextStyle style_;
  int64_t refused_ = 0;
};

absl::StatusOr<int> Tokens(Context& context, const TokensFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const v1::JobOptions options, OptionsFrom(flags.job));
  STATETAP_ASSIGN_OR_RETURN(const auto files, OpenInput(flags.files));
  STATETAP_RETURN_IF_ERROR(CheckInput(context, *files, flags.skip_bad).status());
  std::optional<LocalModel> model;
  Client* client = nullptr;
  std::unique_ptr<TokenText> text;
  if (!flags.model.empty()) {
    STATETAP_ASSIGN_OR_RETURN(model, LocalModel::Open(flags.model));
    text = TextFromModel(*model);
  } else {
    STATETAP_ASSIGN_OR_RETURN(client, context.client());
    text = TextFromServer(*client);
  }
  Printer printer(context, *text, StyleFor(context, flags.text));
  const auto print = [&](const v1::Rendered& rendered) { return printer.Print(rendered); };
  STATETAP_RETURN_IF_ERROR(model ? RenderHere(*model, *files, options, print)
                                 : RenderThere(*client, *files, options, print));
  if (printer.refused() == 0) return kExitDone;
  context.Say(fmt::format("{} refused", printer.refused()));
  return kExitRejected;
}

}  // namespace

Command TokensCommand() {
  return {
      "tokens", "What the model would see of each line: text, ids, loss mask",
      "The supervised part is green on a terminal, else in ⟦ ⟧; special tokens are magenta there, "
      "underlined where supervised, and text that spells one is not. --json has ids and mask "
      "whole. No length limit is applied.\n\n"
      "Examples:\n  statetap tokens prompts.jsonl --thinking off | less\n"
      "  statetap tokens chats.jsonl --turns each --ids\n"
      "  statetap tokens chats.jsonl --model models/tiny-kimi --json    # without a server",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<TokensFlags>();
        app.add_option("FILE", flags->files, "JSON lines; - is standard input")->required();
        app.add_option("--model", flags->model, "A checkpoint's folder; works without a server");
        app.add_flag("--skip-bad", flags->skip_bad, "List lines that are no samples, skip them");
        AddMarkedTextFlags(app, flags->text);
        AddTextFlags(app, flags->job);
        return [=](Context& context) { return Tokens(context, *flags); };
      }};
}

}  // namespace statetap
