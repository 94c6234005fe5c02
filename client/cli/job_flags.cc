#include "client/cli/job_flags.h"

#include <CLI/Option.hpp>
#include <charconv>
#include <limits>

#include "client/cli/command.h"
#include "client/cli/format.h"
#include "extractor/base/text.h"

namespace statetap {
namespace {

absl::Status Bad(std::string_view flag, std::string_view value, std::string_view remedy) {
  return absl::InvalidArgumentError(fmt::format("{} {}: {}", flag, value, remedy));
}

absl::StatusOr<bool> Switch(std::string_view flag, std::string_view value) {
  if (value == "on") return true;
  if (value == "off") return false;
  return Bad(flag, value, "give on or off");
}

absl::StatusOr<int32_t> Count(std::string_view flag, int64_t value, int64_t least) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (value < least || value > kMost)
    return Bad(flag, std::to_string(value), fmt::format("give {} to {}", least, kMost));
  return static_cast<int32_t>(value);
}

absl::Status SetText(const JobFlags& flags, v1::JobOptions& options) {
  if (flags.mode == "generate") options.set_mode(v1::JOB_MODE_GENERATE);
  if (flags.mode == "prefill") options.set_mode(v1::JOB_MODE_PREFILL);
  options.set_template_(flags.template_name);
  options.set_keep_reasoning(flags.keep_reasoning);
  options.set_turns(flags.turns);
  options.set_supervise(flags.supervise);
  options.set_assistant_specials(flags.assistant_specials);
  options.set_parse_special(flags.parse_special);
  if (!flags.thinking.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const bool on, Switch("--thinking", flags.thinking));
    options.set_thinking(on);
  }
  if (!flags.supervise_thought.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const bool on,
                              Switch("--supervise-thought", flags.supervise_thought));
    options.set_supervise_thought(on);
  }
  if (!flags.supervise_stop.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const bool on, Switch("--supervise-stop", flags.supervise_stop));
    options.set_supervise_stop(on);
  }
  return absl::OkStatus();
}

absl::Status SetSampling(const JobFlags& flags, v1::JobOptions& options) {
  if (flags.max_new_tokens) {
    STATETAP_ASSIGN_OR_RETURN(const int32_t count,
                              Count("--max-new-tokens", *flags.max_new_tokens, 1));
    options.set_max_new_tokens(count);
  }
  if (flags.temperature) {
    if (!(*flags.temperature >= 0))
      return Bad("--temperature", fmt::format("{}", *flags.temperature), "give 0 (greedy) or more");
    options.set_temperature(*flags.temperature);
  }
  if (flags.top_p) {
    if (!(*flags.top_p > 0 && *flags.top_p <= 1))
      return Bad("--top-p", fmt::format("{}", *flags.top_p), "give more than 0, at most 1");
    options.set_top_p(*flags.top_p);
  }
  if (flags.seed) options.set_seed(*flags.seed);
  return absl::OkStatus();
}

absl::Status SetCapture(const JobFlags& flags, v1::JobOptions& options) {
  if (CountCharacters(flags.name) > 200)
    return Bad("--name", fmt::format("of {} characters", CountCharacters(flags.name)),
               "give 1 to 200");
  options.set_name(flags.name);
  options.set_no_final(flags.no_final);
  options.set_priority(flags.priority);
  options.set_states(flags.states);
  options.set_gate(flags.gate);
  if (!flags.taps.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<int> taps, ParseTaps(flags.taps));
    options.mutable_taps()->Assign(taps.begin(), taps.end());
  }
  if (flags.max_length) {
    STATETAP_ASSIGN_OR_RETURN(const int32_t length, Count("--max-length", *flags.max_length, 2));
    options.set_max_length(length);
  }
  if (flags.too_long == "truncate") options.set_too_long(v1::TOO_LONG_TRUNCATE);
  if (flags.too_long == "reject") options.set_too_long(v1::TOO_LONG_REJECT);
  if (flags.eval_fraction) {
    if (!(*flags.eval_fraction >= 0 && *flags.eval_fraction < 1))
      return Bad("--eval-fraction", fmt::format("{}", *flags.eval_fraction),
                 "give 0 or more, less than 1");
    options.set_eval_fraction(*flags.eval_fraction);
  }
  if (!flags.logprobs.empty()) {
    STATETAP_ASSIGN_OR_RETURN(const bool on, Switch("--logprobs", flags.logprobs));
    options.set_logprobs(on);
  }
  if (!flags.shard_bytes.empty()) {
    absl::StatusOr<uint64_t> bytes = ParseBytes(flags.shard_bytes);
    if (!bytes.ok()) return WithContext(bytes.status(), "--shard-bytes");
    options.set_shard_bytes(*bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseTaps(std::string_view text) {
  constexpr std::string_view kRemedy =
      "give boundaries as 2,30,58, outputs of layers as output:1,29,57, or eagle3";
  if (text == "eagle3") return std::vector<int>();
  constexpr std::string_view kOutput = "output:";
  const bool outputs = text.starts_with(kOutput);
  std::string_view rest = outputs ? text.substr(kOutput.size()) : text;
  std::vector<int> taps;
  while (true) {
    int value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc()) return Bad("--taps", text, kRemedy);
    rest.remove_prefix(static_cast<size_t>(end - rest.data()));
    // The output of layer k is the stream after k + 1 layers; -1 is the embedding.
    taps.push_back(outputs ? value + 1 : value);
    if (taps.back() < 0) return Bad("--taps", text, fmt::format("{} is no layer", value));
    if (taps.size() > 1 && taps[taps.size() - 2] >= taps.back())
      return Bad("--taps", text, "give them ascending, each once");
    if (rest.empty()) return taps;
    if (rest.front() != ',') return Bad("--taps", text, kRemedy);
    rest.remove_prefix(1);
  }
}

void AddTextFlags(CLI::App& app, JobFlags& flags) {
  app.add_option("--mode", flags.mode,
                 "generate: the model answers; prefill: the text is given [generate for open chats "
                 "and prompts, prefill for ids and finished chats]")
      ->check(CLI::IsMember({"generate", "prefill"}))
      ->group("Text");
  app.add_option("--template", flags.template_name,
                 "auto, kimi-k2.5, kimi-k2-thinking, kimi-k2-instruct or none [auto]")
      ->group("Text");
  app.add_option("--thinking", flags.thinking, "on or off; a line may say its own [on]")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Text");
  app.add_option("--keep-reasoning", flags.keep_reasoning,
                 "Which earlier answers keep their reasoning: none, tool_loop, last or all "
                 "[tool_loop; last for finished chats]")
      ->check(CLI::IsMember({"none", "tool_loop", "last", "all"}))
      ->group("Text");
  app.add_option("--turns", flags.turns,
                 "last: a finished chat's last answer; each: a sample for every answer, with what "
                 "came before it; regenerate: the last answer is left out and written anew [last]")
      ->check(CLI::IsMember({"last", "each", "regenerate"}))
      ->group("Text");
  app.add_option("--supervise", flags.supervise,
                 "Loss mask of a finished chat: on its last answer or on all [last]")
      ->check(CLI::IsMember({"last", "all"}))
      ->group("Text");
  app.add_option("--supervise-thought", flags.supervise_thought,
                 "Loss mask on what the model writes of a think block, on or off [on]")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Text");
  app.add_option("--supervise-stop", flags.supervise_stop,
                 "Loss mask on the token that ends an answer, on or off [on]")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Text");
  app.add_option("--assistant-specials", flags.assistant_specials,
                 "A special token spelled in an assistant's text: text, parsed (is that token) or "
                 "refused (rejects the sample) [text; of others it is always text]")
      ->check(CLI::IsMember({"text", "parsed", "refused"}))
      ->group("Text");
  app.add_flag("--parse-special", flags.parse_special,
               "Read the special tokens that raw prompts spell")
      ->group("Text");
}

void AddSamplingFlags(CLI::App& app, JobFlags& flags) {
  app.add_option("--max-new-tokens", flags.max_new_tokens,
                 "Most tokens of an answer [up to --max-length]")
      ->group("Sampling");
  app.add_option("--temperature", flags.temperature, "0 is greedy [1.0 with thinking, 0.6 without]")
      ->group("Sampling");
  app.add_option("--top-p", flags.top_p, "Nucleus [0.95]")->group("Sampling");
  app.add_option("--seed", flags.seed, "Of the sampling [0]")
      ->check(RefuseNegative)
      ->group("Sampling");
}

void AddCaptureFlags(CLI::App& app, JobFlags& flags) {
  app.add_option("--name", flags.name,
                 "Job's name; the same name, content and options are the same job [file's name]")
      ->group("Capture");
  app.add_option("--taps", flags.taps,
                 "Boundaries to capture, as 2,30,58, or output:1,29,57 for the same as outputs of "
                 "layers, or eagle3 [2, N/2, N-3 of N layers]")
      ->group("Capture");
  app.add_flag("--no-final", flags.no_final, "Do not keep the state before the final norm")
      ->group("Capture");
  app.add_option("--max-length", flags.max_length, "Prompt plus answer, in tokens [8192]")
      ->group("Capture");
  app.add_option("--too-long", flags.too_long, "reject or truncate (prefill only) [reject]")
      ->check(CLI::IsMember({"reject", "truncate"}))
      ->group("Capture");
  app.add_option("--logprobs", flags.logprobs,
                 "Keep log-probability and entropy, on or off [on for sampled tokens]")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Capture");
  app.add_option("--eval-fraction", flags.eval_fraction,
                 "Share of samples that are marked for evaluation, by a hash of their ids [0]")
      ->group("Capture");
  app.add_option("--states", flags.states,
                 "Keep states as bf16, or as fp8 in half the bytes [bf16]")
      ->check(CLI::IsMember({"bf16", "fp8"}))
      ->group("Capture");
  app.add_option("--gate", flags.gate,
                 "Pause after N stored samples, or all if they are fewer, where their statistics "
                 "raise an alarm [0: never]")
      ->check(CLI::NonNegativeNumber)
      ->group("Capture");
  app.add_option("--priority", flags.priority,
                 "Jobs of a higher one run first; equals take turns [0]")
      ->group("Capture");
  app.add_option("--shard-bytes", flags.shard_bytes, "Size at which a shard is closed [4GiB]")
      ->group("Capture");
}

absl::StatusOr<v1::JobOptions> OptionsFrom(const JobFlags& flags) {
  v1::JobOptions options;
  STATETAP_RETURN_IF_ERROR(SetText(flags, options));
  STATETAP_RETURN_IF_ERROR(SetSampling(flags, options));
  STATETAP_RETURN_IF_ERROR(SetCapture(flags, options));
  return options;
}

}  // namespace statetap
