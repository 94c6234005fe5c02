// submit: validate, upload, perhaps wait.
#include <algorithm>
#include <random>

#include "client/cli/commands.h"
#include "client/cli/input_faults.h"
#include "client/cli/job_flags.h"
#include "client/cli/job_text.h"
#include "client/cli/text_width.h"
#include "client/lib/feature_receiver.h"
#include "client/lib/proto_json.h"
#include "client/lib/sample_choice.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

struct SubmitFlags {
  std::vector<std::string> files;
  std::string from;
  JobFlags job;
  std::string max_rejected = "0";
  std::optional<int64_t> sample;
  uint64_t sample_seed = 0;
  bool wait = false, skip_bad = false, dry_run = false;
};

absl::Status SetMode(const InputSummary& summary, v1::JobOptions& options) {
  if (options.mode() != v1::JOB_MODE_UNSPECIFIED) return absl::OkStatus();
  std::optional<LinePlace> generate, prefill;
  for (const auto& [kind, lines] : summary.kinds) {
    const v1::JobMode mode = ModeOf(kind, options.turns());
    if (mode == v1::JOB_MODE_GENERATE && !generate) generate = lines.first;
    if (mode == v1::JOB_MODE_PREFILL && !prefill) prefill = lines.first;
  }
  if (generate && prefill) {
    return absl::InvalidArgumentError(fmt::format(
        "some lines are to be answered ({}) and some hold their answer ({}); say --mode generate "
        "or --mode prefill, or submit them apart",
        At(*generate), At(*prefill)));
  }
  options.set_mode(prefill ? v1::JOB_MODE_PREFILL : v1::JOB_MODE_GENERATE);
  return absl::OkStatus();
}

int64_t CountOf(const InputSummary& summary, LineKind kind) {
  const auto found = summary.kinds.find(kind);
  return found == summary.kinds.end() ? 0 : found->second.samples;
}

// "1,200 open chats, 30 chats that end with an answer, 5 prompts".
std::string DescribeKinds(const InputSummary& summary) {
  std::string text;
  const auto add = [&](int64_t count, std::string_view one, std::string_view many) {
    if (count == 0) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", FormatCount(count),
                        count == 1 ? one : many);
  };
  add(CountOf(summary, LineKind::kOpenChat), "chat to answer", "chats to answer");
  add(CountOf(summary, LineKind::kFinishedChat), "chat that ends with an answer",
      "chats that end with an answer");
  add(CountOf(summary, LineKind::kOtherChat), "other chat", "other chats");
  add(CountOf(summary, LineKind::kPrompt), "prompt", "prompts");
  add(CountOf(summary, LineKind::kTokens), "line of ids", "lines of ids");
  return text;
}

// Samples that these options make rejected, and what would help; empty if there are none.
std::string DescribeRejects(const InputSummary& summary, const v1::JobOptions& options) {
  const bool generate = options.mode() == v1::JOB_MODE_GENERATE;
  const int64_t finished = CountOf(summary, LineKind::kFinishedChat);
  if (generate && options.turns() != "regenerate" && finished > 0)
    return fmt::format(
        "{} of them will be rejected: they end with an answer. --turns regenerate has it written "
        "anew, --mode prefill captures them as they are",
        FormatCount(finished));
  if (!generate && summary.chats_without_answer > 0)
    return fmt::format(
        "{} of them will be rejected: they hold no answer. --mode generate has it written",
        FormatCount(summary.chats_without_answer));
  const int64_t no_chats =
      CountOf(summary, LineKind::kPrompt) + CountOf(summary, LineKind::kTokens);
  const bool supervises = options.supervise() == "all" ||
                          (options.has_supervise_thought() && !options.supervise_thought()) ||
                          (options.has_supervise_stop() && !options.supervise_stop());
  if (!generate && supervises && no_chats > 0)
    return fmt::format(
        "{} of them will be rejected: they are no chats, so that --supervise… would do nothing. "
        "Submit them apart, with the loss_mask that is meant",
        FormatCount(no_chats));
  return "";
}

// What the files hold, said before anything starts.
absl::Status SayKinds(Context& context, const InputSummary& summary,
                      const v1::JobOptions& options) {
  if (options.parse_special() && CountOf(summary, LineKind::kPrompt) == 0)
    return absl::InvalidArgumentError(
        "--parse-special reads raw prompts, and there is none; for what assistants spell there is "
        "--assistant-specials");
  context.Say(DescribeKinds(summary));
  if (options.turns() == "each")
    context.Say(fmt::format("a sample for each of {} answers", FormatCount(summary.answers)));
  if (const std::string rejects = DescribeRejects(summary, options); !rejects.empty())
    context.Say("warning: " + rejects);
  return absl::OkStatus();
}

// A list that equals the default minus one was most likely meant as outputs of layers.
void WarnAboutTaps(Context& context, const v1::JobOptions& options, Client& client) {
  if (options.taps().empty()) return;
  const absl::StatusOr<v1::ModelDescription> model = client.DescribeModel();
  if (!model.ok()) return;  // the upload will say why
  if (std::equal(options.taps().begin(), options.taps().end(), model->tap_layer_outputs().begin(),
                 model->tap_layer_outputs().end())) {
    context.err << fmt::format(
        "warning: --taps {} is the default minus one; --taps counts boundaries (the default is "
        "{}). For outputs of layers write --taps output:{}\n",
        fmt::join(options.taps(), ","), fmt::join(model->taps(), ","),
        fmt::join(options.taps(), ","));
  }
}

// Sends the samples of the files, as often as it takes: an equal job is the same job.
class Upload {
 public:
  // `chosen`: by sample, in order; empty takes all.
  Upload(const InputFiles& files, Context& context, std::vector<bool> chosen, int64_t samples,
         bool skip_bad)
      : files_(files),
        context_(context),
        chosen_(std::move(chosen)),
        samples_(samples),
        skip_bad_(skip_bad) {}

  absl::StatusOr<v1::Job> Run(Client& client, const v1::JobOptions& options) {
    const auto progress = context_.MakeProgress();
    for (int attempt = 1;; ++attempt) {
      absl::StatusOr<v1::Job> job = Try(client, options, *progress);
      if (!absl::IsUnavailable(job.status()) || attempt >= client.options().attempts) return job;
      STATETAP_RETURN_IF_ERROR(client.Backoff(attempt));
    }
  }

 private:
  absl::StatusOr<v1::Job> Try(Client& client, const v1::JobOptions& options, Progress& progress) {
    int64_t sent = 0;
    size_t seen = 0;
    return client.CreateJob(options, [&](const Client::SendSamples& send) -> absl::Status {
      SampleBatcher batcher(send);
      STATETAP_RETURN_IF_ERROR(files_.ForEach(
          [&](InputLine line) -> absl::Status {
            if (context_.interrupted()) return absl::CancelledError("interrupted");
            if (!line.parsed.ok() && skip_bad_) return absl::OkStatus();
            if (!line.parsed.ok())
              return absl::FailedPreconditionError(
                  fmt::format("{}: was good when checked; the file changes", At(line.place)));
            if (!chosen_.empty() && (seen >= chosen_.size() || !chosen_[seen++]))
              return absl::OkStatus();
            progress.ShowCount("uploading", ++sent, samples_);
            return batcher.Add(std::move(line.parsed->sample));
          },
          nullptr));
      return batcher.Flush();
    });
  }

  const InputFiles& files_;
  Context& context_;
  std::vector<bool> chosen_;
  int64_t samples_;
  bool skip_bad_;
};

absl::StatusOr<std::vector<bool>> Choose(const InputFiles& files, int64_t count, uint64_t seed) {
  SampleChoice choice(seed);
  STATETAP_RETURN_IF_ERROR(files.ForEach(
      [&](const InputLine& line) {
        if (line.parsed.ok()) choice.Add(line.parsed->sample);
        return absl::OkStatus();
      },
      nullptr));
  return choice.Choose(count);
}

// The tokens of a job's stored samples, excluded ones left out, as samples of a prefill job.
absl::StatusOr<v1::Job> CaptureAgain(Context& context, Client& client, const std::string& from,
                                     v1::JobOptions options) {
  if (options.mode() == v1::JOB_MODE_GENERATE)
    return absl::InvalidArgumentError(
        "--mode generate: --from captures tokens that are there; to answer the prompts again, "
        "submit their file again");
  STATETAP_ASSIGN_OR_RETURN(const v1::Job source, client.GetJob(from));
  if (const auto& counts = source.counts(); counts.stored() == counts.excluded()) {
    return absl::FailedPreconditionError(
        counts.stored() == 0
            ? fmt::format("job {} has no stored samples to take tokens from", source.id())
            : fmt::format("all {} stored samples of job {} are excluded; take some in again with "
                          "`statetap exclude {} --where … --undo`",
                          counts.stored(), source.id(), source.id()));
  }
  options.set_mode(v1::JOB_MODE_PREFILL);
  if (options.name().empty()) options.set_name(source.name() + " again");
  if (options.max_length() == 0) options.set_max_length(source.options().max_length());
  if (options.template_().empty()) options.set_template_("none");
  if (options.eval_fraction() == 0) options.set_eval_fraction(source.options().eval_fraction());
  v1::StreamStart start;
  start.set_job(source.id());
  start.set_group(fmt::format("submit-from-{:08x}", std::random_device()()));
  start.add_boundaries(-1);
  const auto progress = context.MakeProgress();
  const int64_t total = source.counts().stored() - source.counts().excluded();
  return client.CreateJob(options, [&](const Client::SendSamples& send) -> absl::Status {
    STATETAP_ASSIGN_OR_RETURN(const auto receiver, FeatureReceiver::Open(client, start, {}));
    SampleBatcher batcher(send);
    for (int64_t sent = 0;;) {
      STATETAP_ASSIGN_OR_RETURN(const std::optional<ReceivedSample> received, receiver->Next());
      if (!received) return batcher.Flush();
      const SampleRecord& record = received->record;
      v1::SampleInput sample;
      sample.set_id(record.id);
      sample.set_source(record.source);
      sample.set_meta_json(record.meta_json);
      sample.set_source_line(record.source_index + 1);
      if (options.eval_fraction() == source.options().eval_fraction())
        sample.set_split(record.split);
      sample.mutable_tokens()->mutable_ids()->Assign(record.input_ids.begin(),
                                                     record.input_ids.end());
      sample.mutable_tokens()->set_loss_mask(record.loss_mask.data(), record.loss_mask.size());
      STATETAP_RETURN_IF_ERROR(batcher.Add(std::move(sample)));
      progress->ShowCount("uploading", ++sent, total);
    }
  });
}

// `samples` of those in the files; the rest of the summary is the files'.
int PrintPlan(Context& context, const InputSummary& summary, int64_t samples,
              const v1::JobOptions& options) {
  if (context.json) {
    Json sources = Json::object();
    for (const auto& [source, count] : summary.samples_by_source) sources[source] = count;
    context.PrintJson({{"samples", samples},
                       {"samples_in_files", summary.samples},
                       {"skipped_lines", summary.faulty_lines},
                       {"text_bytes", summary.text_bytes},
                       {"token_ids", summary.token_ids},
                       {"samples_by_source", std::move(sources)},
                       {"prompts", CountOf(summary, LineKind::kPrompt)},
                       {"open_chats", CountOf(summary, LineKind::kOpenChat)},
                       {"finished_chats", CountOf(summary, LineKind::kFinishedChat)},
                       {"other_chats", CountOf(summary, LineKind::kOtherChat)},
                       {"token_lines", CountOf(summary, LineKind::kTokens)},
                       {"answers", summary.answers},
                       {"chats_without_answer", summary.chats_without_answer},
                       {"options", JsonOf(options)}});
    return kExitDone;
  }
  context.out << fmt::format(
      "would submit {}{} samples as \"{}\", mode {}\n", FormatCount(samples),
      samples == summary.samples ? "" : fmt::format(" of {}", FormatCount(summary.samples)),
      options.name(), options.mode() == v1::JOB_MODE_PREFILL ? "prefill" : "generate");
  for (const auto& [source, count] : summary.samples_by_source)
    context.out << fmt::format("  {} from {}\n", FormatCount(count), Printable(source));
  if (summary.text_bytes > 0)
    context.out << fmt::format("  {} of text\n", FormatBytes(summary.text_bytes));
  if (summary.token_ids > 0)
    context.out << fmt::format("  {} token ids\n", FormatCount(summary.token_ids));
  return kExitDone;
}

absl::StatusOr<int> ReportJob(Context& context, const v1::Job& job, bool wait,
                              const Allowance& max_rejected) {
  if (job.existed()) {
    context.Say(
        fmt::format("the same job was submitted before and is {}; nothing runs twice (another "
                    "--name makes another job)",
                    EnumName(*v1::JobState_descriptor()->FindValueByNumber(job.state()))));
  }
  if (job.duplicates() > 0)
    context.Say(fmt::format(
        "{} repeat{} an id with the same content: each id counts once, with its first line's "
        "source, meta and split",
        job.duplicates() == 1 ? "1 line" : FormatCount(job.duplicates()) + " lines",
        job.duplicates() == 1 ? "s" : ""));
  // The id comes first and alone, so that it is known whatever happens while waiting.
  if (!context.json) context.out << job.id() << '\n' << std::flush;
  if (!wait) {
    if (context.json) context.PrintJson({{"id", job.id()}, {"existed", job.existed()}});
    if (job.existed()) return kExitDone;
    context.Say(fmt::format("{} samples submitted; follow them with `statetap watch {}`",
                            FormatCount(job.counts().submitted()), job.id()));
    return kExitDone;
  }
  STATETAP_ASSIGN_OR_RETURN(const v1::Job ended, FollowJob(context, job.id(), nullptr));
  if (context.json) context.PrintJson(JsonOf(ended));
  context.Say(DescribeJob(ended));
  return ExitCodeOf(ended, max_rejected);
}

absl::StatusOr<int> Submit(Context& context, const SubmitFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Allowance max_rejected, ParseAllowance(flags.max_rejected));
  STATETAP_ASSIGN_OR_RETURN(v1::JobOptions options, OptionsFrom(flags.job));
  if (flags.from.empty() == flags.files.empty())
    return absl::InvalidArgumentError("what is to be captured? give either files, or --from JOB");
  if (!flags.from.empty()) {
    for (const auto& [given, flag] :
         {std::pair(flags.dry_run, "--dry-run"), std::pair(flags.skip_bad, "--skip-bad"),
          std::pair(flags.sample.has_value(), "--sample")})
      if (given) return absl::InvalidArgumentError(fmt::format("{} is for files", flag));
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    WarnAboutTaps(context, options, *client);
    STATETAP_ASSIGN_OR_RETURN(const v1::Job job,
                              CaptureAgain(context, *client, flags.from, options));
    return ReportJob(context, job, flags.wait, max_rejected);
  }
  STATETAP_ASSIGN_OR_RETURN(const auto files, OpenInput(flags.files));
  STATETAP_ASSIGN_OR_RETURN(const InputSummary summary,
                            CheckInput(context, *files, flags.skip_bad));
  STATETAP_RETURN_IF_ERROR(SetMode(summary, options));
  STATETAP_RETURN_IF_ERROR(SayKinds(context, summary, options));
  int64_t samples = summary.samples;
  std::vector<bool> chosen;
  if (flags.sample && *flags.sample < samples) {
    samples = *flags.sample;
    STATETAP_ASSIGN_OR_RETURN(chosen, Choose(*files, samples, flags.sample_seed));
  }
  if (options.name().empty() && !files->DefaultName().empty()) {
    options.set_name(chosen.empty() ? files->DefaultName()
                                    : fmt::format("{} {} of {}", files->DefaultName(), samples,
                                                  summary.samples));
  }
  if (flags.dry_run) return PrintPlan(context, summary, samples, options);

  STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
  WarnAboutTaps(context, options, *client);
  STATETAP_ASSIGN_OR_RETURN(
      const v1::Job job,
      Upload(*files, context, std::move(chosen), samples, flags.skip_bad).Run(*client, options));
  return ReportJob(context, job, flags.wait, max_rejected);
}

}  // namespace

Command SubmitCommand() {
  return {
      "submit", "Checks files of prompts or chats, uploads them and prints the job's id",
      "Input: JSON lines (.jsonl, also gzip or zstd, or a pipe; - is standard input), each one of\n"
      "  {\"id\", \"messages\": [...], \"tools\": [...]}         a chat\n"
      "  {\"id\", \"prompt\": \"text\"}                          raw text\n"
      "  {\"id\", \"input_ids\": [...], \"loss_mask\": [...]}    token ids\n"
      "  {\"prompt_token_ids\": [...], \"token_ids\": [...]}   another engine's answer\n"
      "  {\"custom_id\", \"body\": {\"messages\": ...}}          an OpenAI batch line\n"
      "  {\"conversations\": [{\"from\", \"value\"}, ...]}       ShareGPT\n"
      "and optionally source, meta (scalars), thinking, max_new_tokens.\n\n"
      "Examples:\n  statetap submit prompts.jsonl --wait\n"
      "  statetap submit chats.jsonl.gz --mode prefill --taps 2,4,5\n"
      "  statetap submit chats.jsonl --sample 10 --wait          # a pilot, then 1000, then all\n"
      "  zcat more.gz | statetap submit - --name more --max-rejected 1%\n"
      "  statetap submit --from mine --taps 1,4,6 --wait",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<SubmitFlags>();
        app.add_option("FILE", flags->files, "JSON lines; - is standard input");
        app.add_option("--from", flags->from,
                       "Capture the tokens of a stored job again, with other taps or another "
                       "model; nothing is generated");
        app.add_option("--sample", flags->sample,
                       "Take N of the samples, of each source its share; fewer are always "
                       "among more")
            ->check(AtLeastOne);
        app.add_option("--sample-seed", flags->sample_seed, "Of the choice [0]")
            ->check(RefuseNegative);
        app.add_flag("--wait", flags->wait, "Show progress and exit as the job ends");
        app.add_flag("--dry-run", flags->dry_run, "Check the files and submit nothing");
        app.add_flag("--skip-bad", flags->skip_bad, "List lines that are no samples, skip them");
        app.add_option("--max-rejected", flags->max_rejected,
                       "With --wait: more rejected samples than N or P% exit with 3 [0]");
        AddTextFlags(app, flags->job);
        AddSamplingFlags(app, flags->job);
        AddCaptureFlags(app, flags->job);
        return [=](Context& context) { return Submit(context, *flags); };
      }};
}

}  // namespace statetap
