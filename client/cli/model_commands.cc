// model, ask.
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/job_flags.h"
#include "client/lib/proto_json.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

std::string DescribeModel(const v1::ModelDescription& model) {
  std::string text = fmt::format("{} ({})\n", model.name(), model.path());
  const auto line = [&](std::string_view name, std::string_view value) {
    if (!value.empty()) text += fmt::format("  {:<12} {}\n", name, value);
  };
  line("architecture",
       fmt::format("{}, {} parameters", model.architecture(), FormatCount(model.parameters())));
  line("layers", fmt::format("{} of hidden {}, vocabulary {}", model.layers(), model.hidden(),
                             FormatCount(model.vocab())));
  line("experts", fmt::format("{}, {} of them for a token", model.experts(), model.top_k()));
  line("quantised", model.quantization());
  line("taps", model.taps().empty()
                   ? "none by default: fewer than 7 layers, so --taps must be given"
                   : fmt::format("{} (outputs of layers {})", fmt::join(model.taps(), ","),
                                 fmt::join(model.tap_layer_outputs(), ",")));
  line("template", fmt::format("{} {}", model.template_(), model.template_digest()));
  line("weights", model.weight_digest());
  line("tokenizer", model.tokenizer_digest());
  line("backend",
       fmt::format("{}, {} rank{}, kernels {}, experts by {}", model.backend(), model.ranks(),
                   model.ranks() == 1 ? "" : "s", model.kernels(), model.expert_layout()));
  line("limits", fmt::format("{} tokens a sample, {} a step", FormatCount(model.max_seq_len()),
                             FormatCount(model.max_batch_tokens())));
  line("inner eps", fmt::format("{}", model.inner_eps()));
  for (const v1::Memory& memory : model.memory()) line(memory.what(), FormatBytes(memory.bytes()));
  line("server", model.version());
  return text;
}

absl::StatusOr<int> ShowModel(Context& context) {
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  STATETAP_ASSIGN_OR_RETURN(const v1::ModelDescription model, client->DescribeModel());
  if (context.json) {
    context.PrintJson(JsonOf(model));
  } else {
    context.out << DescribeModel(model);
  }
  return kExitDone;
}

struct AskFlags {
  std::string text, system;
  bool raw = false;
  JobFlags job;
};

v1::SampleInput QuestionOf(const AskFlags& flags) {
  v1::SampleInput sample;
  if (flags.raw) {
    sample.set_prompt(flags.text);
    return sample;
  }
  Json messages = Json::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  messages.push_back({{"role", "user"}, {"content", flags.text}});
  sample.mutable_chat()->set_messages_json(DumpJson(messages));
  return sample;
}

absl::StatusOr<int> Ask(Context& context, const AskFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(v1::JobOptions options, OptionsFrom(flags.job));
  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  options.set_mode(v1::JOB_MODE_GENERATE);
  v1::GenerateRequest request;
  *request.mutable_options() = options;
  *request.mutable_sample() = QuestionOf(flags);
  std::string answer;
  v1::GenerateResponse last;
  STATETAP_RETURN_IF_ERROR(client->Generate(request, [&](const v1::GenerateResponse& message) {
    answer += message.text();
    if (!context.json) context.out << message.text() << std::flush;
    last = message;
  }));
  const double rate = last.seconds() > 0 ? last.tokens() / last.seconds() : 0;
  if (context.json) {
    context.PrintJson({{"text", answer},
                       {"finish_reason", last.finish_reason()},
                       {"prompt_tokens", last.prompt_tokens()},
                       {"tokens", last.tokens()},
                       {"seconds", last.seconds()},
                       {"tokens_per_second", rate}});
    return kExitDone;
  }
  context.out << '\n';
  context.Say(fmt::format("{} prompt tokens, {} answered in {:.2f} s ({} tok/s), ended by {}",
                          last.prompt_tokens(), last.tokens(), last.seconds(), FormatRate(rate),
                          last.finish_reason()));
  return kExitDone;
}

}  // namespace

std::vector<Command> ModelCommands() {
  Command model{"model", "What the server serves: sizes, taps, digests, ranks, memory",
                "Example:\n  statetap model --json | jq .taps",
                [](CLI::App&) -> Runner { return ShowModel; }};
  Command ask{"ask", "One answer from the served model; nothing is stored",
              "Examples:\n  statetap ask \"What is the capital of Serbia?\"\n"
              "  statetap ask \"Count to five.\" --thinking off --temperature 0",
              [](CLI::App& app) -> Runner {
                auto flags = std::make_shared<AskFlags>();
                app.add_option("TEXT", flags->text, "What the user says")->required();
                app.add_option("--system", flags->system, "A system message before it");
                app.add_flag("--raw", flags->raw, "TEXT as it is, without a template");
                app.add_option("--template", flags->job.template_name,
                               "auto, kimi-k2.5, kimi-k2-thinking, kimi-k2-instruct [auto]");
                app.add_option("--thinking", flags->job.thinking, "on or off [on]")
                    ->check(CLI::IsMember({"on", "off"}));
                app.add_flag("--parse-special", flags->job.parse_special,
                             "With --raw: read the special tokens that TEXT spells");
                AddSamplingFlags(app, flags->job);
                return [=](Context& context) { return Ask(context, *flags); };
              }};
  return {model, ask};
}

}  // namespace statetap
