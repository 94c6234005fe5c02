// tokens: what the model would see of each line.
#include <algorithm>

#include "client/cli/commands.h"
#include "client/cli/input_faults.h"
#include "client/cli/job_flags.h"
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
  bool skip_bad = false;
};

using OnRendered = std::function<absl::Status(const v1::Rendered&)>;

// Each line in its own mode where --mode does not say.
v1::JobOptions OptionsFor(const ParsedLine& line, v1::JobOptions options) {
  if (options.mode() == v1::JOB_MODE_UNSPECIFIED)
    options.set_mode(line.mode == v1::JOB_MODE_PREFILL ? v1::JOB_MODE_PREFILL
                                                       : v1::JOB_MODE_GENERATE);
  return options;
}

absl::Status RenderHere(const LocalModel& model, const InputFiles& files,
                        const v1::JobOptions& options, const OnRendered& on_rendered) {
  return files.ForEach(
      [&](InputLine line) -> absl::Status {
        if (!line.parsed.ok()) return absl::OkStatus();
        STATETAP_ASSIGN_OR_RETURN(
            const v1::Rendered rendered,
            model.Render(OptionsFor(*line.parsed, options), line.parsed->sample));
        return on_rendered(rendered);
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
          *request.mutable_options() = OptionsFor(*line.parsed, options);
          *request.mutable_sample() = std::move(line.parsed->sample);
          return send(request) ? absl::OkStatus() : absl::AbortedError("the server ended the call");
        },
        nullptr);
  };
  return client.Render(fill, on_rendered);
}

class Printer {
 public:
  // `text` may be null: with --json no text of parts is needed.
  Printer(Context& context, TokenText* text) : context_(context), text_(text) {}

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
    context_.PrintJson(json);
  }

  absl::Status PrintText(const v1::Rendered& rendered) {
    const std::vector<int32_t> ids(rendered.input_ids().begin(), rendered.input_ids().end());
    const auto supervised =
        std::count(rendered.loss_mask().begin(), rendered.loss_mask().end(), '\1');
    STATETAP_ASSIGN_OR_RETURN(const std::string marked,
                              MarkedText(*text_, ids, rendered.loss_mask(), context_.terminal.out));
    std::string mask;
    for (const char bit : rendered.loss_mask()) mask += bit != 0 ? '1' : '0';
    context_.out << fmt::format("── {}: {} tokens, {} supervised\n{}\nids  {}\nmask {}\n\n",
                                Printable(rendered.id()), ids.size(), supervised, marked,
                                fmt::join(ids, " "), mask);
    return absl::OkStatus();
  }

  Context& context_;
  TokenText* text_;
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
  Printer printer(context, text.get());
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
      "The supervised part is green on a terminal, else in ⟦ ⟧. No length limit is applied.\n\n"
      "Examples:\n  statetap tokens prompts.jsonl --thinking off | less\n"
      "  statetap tokens chats.jsonl --model models/tiny-kimi --json    # without a server",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<TokensFlags>();
        app.add_option("FILE", flags->files, "JSON lines; - is standard input")->required();
        app.add_option("--model", flags->model, "A checkpoint's folder; works without a server");
        app.add_flag("--skip-bad", flags->skip_bad, "List lines that are no samples, skip them");
        AddTextFlags(app, flags->job);
        return [=](Context& context) { return Tokens(context, *flags); };
      }};
}

}  // namespace statetap
