// Commands in process against a server that is made up: output, exit codes, what is uploaded.
#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "client/cli/command.h"
#include "client/cli/job_flags.h"
#include "extractor/base/json.h"
#include "tests/checkpoint/editable_drafter.h"
#include "tests/client/fake_server.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempDir;

struct Outcome {
  int code;
  std::string out, err;
};

class CliTest : public ::testing::Test {
 protected:
  Outcome RunAt(const std::string& address, const std::vector<std::string>& arguments,
                Context::Terminal terminal = {}) {
    std::ostringstream out, err;
    Context context(out, err, terminal);
    context.server = address;
    context.client_options.first_backoff = std::chrono::milliseconds(1);
    const int code = RunApp(arguments, context);
    return {code, out.str(), err.str()};
  }
  Outcome Run(const std::vector<std::string>& arguments) {
    return RunAt(server_.address(), arguments);
  }
  std::string Write(const std::string& name, const std::string& content) {
    std::ofstream(dir_ / name, std::ios::binary) << content;
    return (dir_ / name).string();
  }
  std::string Prompts(int count, const std::string& front = "p") {
    std::string text;
    for (int i = 0; i < count; ++i)
      text += fmt::format("{{\"id\":\"{}{}\",\"prompt\":\"text {}\"}}\n", front, i, i);
    return Write("prompts.jsonl", text);
  }
  Json ParseOut(const Outcome& outcome) {
    absl::StatusOr<Json> json = ParseJson(outcome.out);
    EXPECT_OK(json) << outcome.out;
    return json.ok() ? *std::move(json) : Json();
  }

  FakeServer server_;
  TempDir dir_;
};

TEST_F(CliTest, SubmitPrintsTheIdAndUploadsEveryLine) {
  const Outcome outcome = Run({"submit", Prompts(10)});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_EQ(outcome.out, "job-1\n");
  const auto jobs = server_.jobs.jobs();
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0].samples.size(), 10u);
  EXPECT_EQ(jobs[0].samples[4].source_line(), 5);
  EXPECT_EQ(jobs[0].samples[4].source(), "prompts.jsonl");
  EXPECT_EQ(jobs[0].job.options().name(), "prompts.jsonl");
  EXPECT_EQ(jobs[0].job.options().mode(), v1::JOB_MODE_GENERATE);
}

TEST_F(CliTest, SubmitWaitsAndSummarises) {
  const Outcome outcome = Run({"submit", Prompts(3), "--wait"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_EQ(outcome.out, "job-1\n");
  EXPECT_THAT(outcome.err, HasSubstr("succeeded"));
  EXPECT_THAT(outcome.err, HasSubstr("3 stored"));
  EXPECT_THAT(outcome.err, HasSubstr("2, 4, 8 (outputs of layers 1, 3, 7)"));
}

TEST_F(CliTest, RejectsDecideTheExitCode) {
  const std::string file = Write("mixed.jsonl",
                                 "{\"id\":\"bad1\",\"prompt\":\"x\"}\n"
                                 "{\"id\":\"good\",\"prompt\":\"x\"}\n");
  const Outcome three = Run({"submit", file, "--wait"});
  EXPECT_EQ(three.code, kExitRejected);
  EXPECT_THAT(three.err, HasSubstr("statetap rejected job-1"));
  EXPECT_EQ(Run({"submit", file, "--wait", "--max-rejected", "1"}).code, kExitDone);
  EXPECT_EQ(Run({"submit", file, "--wait", "--max-rejected", "50%"}).code, kExitDone);
  EXPECT_EQ(Run({"submit", file, "--wait", "--max-rejected", "49%"}).code, kExitRejected);
  EXPECT_EQ(Run({"watch", "job-1"}).code, kExitRejected);
  EXPECT_EQ(Run({"watch", "job-1", "--max-rejected", "1"}).code, kExitDone);
  const Outcome failed = Run({"submit", Prompts(2, "bad"), "--wait", "--max-rejected", "100%"});
  EXPECT_EQ(failed.code, kExitFailed) << "no stored sample is a failed job";
  EXPECT_THAT(failed.err, HasSubstr("all samples were rejected"));
}

TEST_F(CliTest, JsonOfAJobIsTheProto) {
  EXPECT_EQ(Run({"submit", Prompts(2), "--json"}).out, "{\"id\":\"job-1\",\"existed\":false}\n");
  const Json waited = ParseOut(Run({"--json", "submit", Prompts(2), "--wait", "--name", "two"}));
  EXPECT_EQ(waited["id"], "job-2");
  EXPECT_EQ(waited["state"], "succeeded");
  const Json show = ParseOut(Run({"show", "two", "--json"}));
  EXPECT_EQ(show["counts"]["stored"], 2);
  EXPECT_EQ(show["counts"]["to_do"], 0);
  EXPECT_EQ(show["options"]["mode"], "generate");
  const Json list = ParseOut(Run({"list", "--json"}));
  EXPECT_EQ(list["jobs"][0]["name"], "two");
  EXPECT_EQ(list["jobs"].size(), 2u);
  std::istringstream lines(Run({"watch", "two", "--json"}).out);
  std::vector<Json> states;
  for (std::string line; std::getline(lines, line);) states.push_back(*ParseJson(line));
  ASSERT_EQ(states.size(), 2u);
  EXPECT_EQ(states[0]["state"], "running");
  EXPECT_EQ(states[1]["state"], "succeeded");
}

TEST_F(CliTest, ABadFileSubmitsNothing) {
  const std::string file =
      Write("bad.jsonl", "{\"prompt\":\"x\"}\n{\"text\":\"y\"}\n\xff\n{\"prompt\":3}\n");
  const Outcome refused = Run({"submit", file});
  EXPECT_EQ(refused.code, kExitUsage);
  EXPECT_EQ(refused.out, "");
  EXPECT_THAT(refused.err, HasSubstr("bad.jsonl line 2: "));
  EXPECT_THAT(refused.err, HasSubstr("bad.jsonl line 3: "));
  EXPECT_THAT(refused.err, HasSubstr("bad.jsonl line 4: prompt is 3"));
  EXPECT_THAT(refused.err, HasSubstr("3 bad lines"));
  EXPECT_TRUE(server_.jobs.jobs().empty());

  const Outcome skipped = Run({"submit", file, "--skip-bad"});
  EXPECT_EQ(skipped.code, kExitDone) << skipped.err;
  EXPECT_THAT(skipped.err, HasSubstr("bad.jsonl line 4"));
  ASSERT_EQ(server_.jobs.jobs().size(), 1u);
  EXPECT_EQ(server_.jobs.jobs()[0].samples.size(), 1u);
}

TEST_F(CliTest, EmptyMissingAndMixedInputIsRefused) {
  EXPECT_EQ(Run({"submit", Write("empty", "\n\n")}).code, kExitUsage);
  const Outcome missing = Run({"submit", (dir_ / "none.jsonl").string()});
  EXPECT_EQ(missing.code, kExitUsage);
  EXPECT_THAT(missing.err, HasSubstr("none.jsonl"));
  EXPECT_EQ(Run({"submit", dir_.path().string()}).code, kExitUsage);
  const std::string mixed = Write("m.jsonl", "{\"prompt\":\"x\"}\n{\"input_ids\":[1]}\n");
  const Outcome refused = Run({"submit", mixed});
  EXPECT_EQ(refused.code, kExitUsage);
  EXPECT_THAT(refused.err, HasSubstr("m.jsonl line 2"));
  EXPECT_THAT(refused.err, HasSubstr("--mode"));
  EXPECT_TRUE(server_.jobs.jobs().empty());
  EXPECT_EQ(Run({"submit", mixed, "--mode", "prefill"}).code, kExitDone);
}

TEST_F(CliTest, DryRunNeedsNoServer) {
  const std::string file = Prompts(4);
  const Outcome outcome = RunAt("127.0.0.1:1", {"submit", file, "--dry-run", "--json"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  const Json plan = ParseOut(outcome);
  EXPECT_EQ(plan["samples"], 4);
  EXPECT_EQ(plan["options"]["mode"], "generate");
}

TEST_F(CliTest, UploadMessagesStayBelowFourMebibytes) {
  std::string text;
  for (int i = 0; i < 30; ++i)
    text += fmt::format("{{\"prompt\":\"{}\"}}\n", std::string(400'000, 'x'));
  text += fmt::format("{{\"prompt\":\"{}\"}}\n", std::string(6'000'000, 'y'));
  for (int i = 0; i < 12'000; ++i) text += "{\"input_ids\":[1,2]}\n";
  const Outcome outcome = Run({"submit", Write("big", text), "--mode", "prefill"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  const auto job = server_.jobs.jobs()[0];
  EXPECT_EQ(job.samples.size(), 12'031u);
  int large = 0;
  for (const size_t bytes : job.message_bytes) large += bytes > size_t{4} << 20 ? 1 : 0;
  EXPECT_EQ(large, 1) << "only the sample that is larger by itself";
  EXPECT_GE(job.message_bytes.size(), 7u);
}

TEST_F(CliTest, OptionsReachTheServer) {
  const Outcome outcome = Run({"submit",
                               Prompts(1),
                               "--name",
                               "n",
                               "--taps",
                               "output:1,3",
                               "--no-final",
                               "--max-new-tokens",
                               "7",
                               "--max-length",
                               "100",
                               "--too-long",
                               "truncate",
                               "--temperature",
                               "0",
                               "--top-p",
                               "0.5",
                               "--seed",
                               "18446744073709551615",
                               "--template",
                               "none",
                               "--thinking",
                               "off",
                               "--keep-reasoning",
                               "all",
                               "--logprobs",
                               "off",
                               "--shard-bytes",
                               "2MiB",
                               "--eval-fraction",
                               "0.25",
                               "--mode",
                               "prefill"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  const v1::JobOptions options = server_.jobs.jobs()[0].job.options();
  EXPECT_EQ(options.name(), "n");
  EXPECT_EQ(std::vector<int>(options.taps().begin(), options.taps().end()),
            (std::vector<int>{2, 4}));
  EXPECT_TRUE(options.no_final());
  EXPECT_EQ(options.max_new_tokens(), 7);
  EXPECT_EQ(options.max_length(), 100);
  EXPECT_EQ(options.too_long(), v1::TOO_LONG_TRUNCATE);
  EXPECT_TRUE(options.has_temperature());
  EXPECT_EQ(options.temperature(), 0);
  EXPECT_EQ(options.top_p(), 0.5);
  EXPECT_EQ(options.seed(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(options.template_(), "none");
  EXPECT_FALSE(options.thinking());
  EXPECT_TRUE(options.has_thinking());
  EXPECT_EQ(options.keep_reasoning(), "all");
  EXPECT_FALSE(options.logprobs());
  EXPECT_EQ(options.shard_bytes(), 2u << 20);
  EXPECT_EQ(options.eval_fraction(), 0.25);
  EXPECT_EQ(options.mode(), v1::JOB_MODE_PREFILL);
}

TEST_F(CliTest, OptionsOutOfRangeAreWrongUsage) {
  const std::string file = Prompts(1);
  for (const std::vector<std::string>& flags :
       std::vector<std::vector<std::string>>{{"--max-new-tokens", "0"},
                                             {"--max-new-tokens", "-1"},
                                             {"--max-new-tokens", "2147483648"},
                                             {"--max-length", "1"},
                                             {"--temperature", "-1"},
                                             {"--temperature", "nan"},
                                             {"--top-p", "0"},
                                             {"--top-p", "1.1"},
                                             {"--thinking", "maybe"},
                                             {"--mode", "both"},
                                             {"--eval-fraction", "1"},
                                             {"--taps", "2,2"},
                                             {"--taps", "5,2"},
                                             {"--taps", "2,"},
                                             {"--taps", "x"},
                                             {"--taps", "-1"},
                                             {"--shard-bytes", "big"},
                                             {"--max-rejected", "200%"},
                                             {"--seed", "-1"},
                                             {"--max-new-tokens", "ten"},
                                             {"--template", "unknown"}}) {
    std::vector<std::string> arguments = {"submit", file};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, kExitUsage) << flags[0] << " " << flags[1] << ": " << outcome.err;
    EXPECT_NE(outcome.err, "");
  }
  EXPECT_TRUE(server_.jobs.jobs().empty());
}

TEST_F(CliTest, TapsThatLookLikeOutputsOfLayersWarn) {
  EXPECT_THAT(Run({"submit", Prompts(1), "--taps", "1,3,4"}).err, HasSubstr("--taps output:1,3,4"));
  EXPECT_THAT(Run({"submit", Prompts(1), "--taps", "2,4,5"}).err, Not(HasSubstr("warning")));
}

TEST_F(CliTest, TyposGetASuggestion) {
  const Outcome command = Run({"sumbit", "x"});
  EXPECT_EQ(command.code, kExitUsage);
  EXPECT_THAT(command.err, HasSubstr("did you mean submit?"));
  const Outcome flag = Run({"submit", Prompts(1), "--temprature", "1"});
  EXPECT_EQ(flag.code, kExitUsage);
  EXPECT_THAT(flag.err, HasSubstr("did you mean --temperature?"));
  const Outcome assigned = Run({"list", "--jsno=1"});
  EXPECT_EQ(assigned.code, kExitUsage);
  EXPECT_THAT(assigned.err, HasSubstr("did you mean --json?"));
  EXPECT_EQ(Run({"submit"}).code, kExitUsage);
  EXPECT_EQ(Run({"show"}).code, kExitUsage);
  EXPECT_EQ(Run({"list", "extra"}).code, kExitUsage);
  EXPECT_EQ(Run({}).code, kExitUsage);
  EXPECT_THAT(Run({"show", "list"}).err, HasSubstr("no job \"list\""))
      << "a job may be named like a command";
  EXPECT_TRUE(server_.jobs.jobs().empty());
}

TEST_F(CliTest, EveryCommandHasHelpWithAnExample) {
  for (const Command& command : AllCommands()) {
    const Outcome outcome = Run({command.name, "--help"});
    EXPECT_EQ(outcome.code, kExitDone);
    EXPECT_THAT(outcome.out, HasSubstr("statetap " + command.name)) << command.name;
    EXPECT_THAT(outcome.out, HasSubstr("Example")) << command.name;
    EXPECT_EQ(outcome.err, "");
  }
  EXPECT_EQ(Run({"--help"}).code, kExitDone);
  EXPECT_THAT(Run({"--version"}).out, HasSubstr("statetap 0."));
}

TEST_F(CliTest, ManualAndCompletionNameEveryCommandAndOption) {
  const std::string manual = Run({"manual"}).out;
  const std::string bash = Run({"completion", "bash"}).out;
  const std::string zsh = Run({"completion", "zsh"}).out;
  const std::string fish = Run({"completion", "fish"}).out;
  for (const Command& command : AllCommands()) {
    std::string name = command.name;
    EXPECT_THAT(fish, HasSubstr("-a " + name + " -d "));
    EXPECT_THAT(bash, HasSubstr("    " + name + ") words="));
    if (const size_t dash = name.find('-'); dash != std::string::npos) name.insert(dash, "\\");
    EXPECT_THAT(manual, HasSubstr(".SS " + name + "\n"));
  }
  EXPECT_THAT(manual, HasSubstr("\\-\\-max\\-new\\-tokens"));
  EXPECT_THAT(bash, HasSubstr("--max-new-tokens"));
  EXPECT_THAT(fish, HasSubstr("-l max-new-tokens"));
  EXPECT_TRUE(zsh.starts_with("autoload"));
  EXPECT_EQ(Run({"completion", "tcsh"}).code, kExitUsage);
}

TEST_F(CliTest, NoServerNamesTheAddressAndTheRemedy) {
  const Outcome outcome = RunAt("127.0.0.1:1", {"list"});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("127.0.0.1:1"));
  EXPECT_THAT(outcome.err, HasSubstr("statetapd --model"));
  const Outcome port = Run({"list", "--server", "localhost"});
  EXPECT_EQ(port.code, kExitUsage);
  EXPECT_THAT(port.err, HasSubstr("HOST:PORT"));
}

TEST_F(CliTest, ErrorsOfTheServerKeepTheirWords) {
  const Outcome missing = Run({"show", "nothing"});
  EXPECT_EQ(missing.code, kExitFailed);
  EXPECT_THAT(missing.err, HasSubstr("no job \"nothing\""));
  Run({"submit", Prompts(1)});
  const Outcome ended = Run({"cancel", "job-1"});
  EXPECT_EQ(ended.code, kExitFailed);
  EXPECT_THAT(ended.err, HasSubstr("has ended"));
}

TEST_F(CliTest, CallsThatChangeNothingAreTriedAgain) {
  Run({"submit", Prompts(1)});
  server_.jobs.unavailable = 2;
  EXPECT_EQ(Run({"show", "job-1"}).code, kExitDone);
  server_.jobs.unavailable = 100;
  const Outcome outcome = Run({"show", "job-1"});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("drains"));
}

TEST_F(CliTest, AWatchGoesOnWhenTheServerComesBack) {
  Run({"submit", Prompts(1)});
  // A server that is ending may cut calls, which nobody here has interrupted.
  for (const auto code : {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED}) {
    server_.jobs.break_code = code;
    server_.jobs.watch_breaks = 2;
    const Outcome outcome = Run({"watch", "job-1"});
    EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("lost the server"));
    EXPECT_EQ(outcome.err.find("lost the server"), outcome.err.rfind("lost the server"));
    EXPECT_THAT(outcome.out, HasSubstr("succeeded"));
  }
}

TEST_F(CliTest, StandardInputIsReadTwice) {
  const std::string file = Prompts(7);
  const int saved = dup(STDIN_FILENO);
  const int given = open(file.c_str(), O_RDONLY);
  dup2(given, STDIN_FILENO);
  const Outcome outcome = Run({"submit", "-"});
  dup2(saved, STDIN_FILENO);
  close(given);
  close(saved);
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  ASSERT_EQ(server_.jobs.jobs()[0].samples.size(), 7u);
  EXPECT_EQ(server_.jobs.jobs()[0].samples[6].source(), "stdin");
  EXPECT_EQ(server_.jobs.jobs()[0].job.options().name(), "") << "named by its content";
}

TEST_F(CliTest, SamplesAndRejectedOverAllPages) {
  const std::string file =
      Write("f.jsonl",
            "{\"id\":\"a\\u001b[31m\",\"prompt\":\"x\"}\n"
            "{\"id\":\"bad\",\"prompt\":\"x\"}\n"
            "{\"id\":\"c\",\"prompt\":\"x\"}\n{\"id\":\"d\",\"prompt\":\"x\"}\n"
            "{\"id\":\"e\",\"prompt\":\"x\"}\n");
  Run({"submit", file});
  const Json samples = ParseOut(Run({"samples", "job-1", "--json"}));
  ASSERT_EQ(samples["samples"].size(), 4u);
  EXPECT_EQ(samples["samples"][3]["id"], "e");
  EXPECT_TRUE(samples["samples"][3]["mean_logprob"].is_null());
  EXPECT_THAT(Run({"samples", "job-1"}).out, HasSubstr("a\\x1b[31m"));
  const Json rejected = ParseOut(Run({"rejected", "f.jsonl", "--json"}));
  EXPECT_EQ(rejected["rejected"][0]["source_line"], 2);
  EXPECT_EQ(rejected["rejected"][0]["layer"], 3);
  EXPECT_TRUE(rejected["rejected"][0]["token"].is_null());
  EXPECT_EQ(Run({"samples", "none", "--json"}).out, "") << "no half list on an error";
}

TEST_F(CliTest, StatsShardsAndCheck) {
  const Outcome stats = Run({"stats", "job-1", "--plot"});
  EXPECT_EQ(stats.code, kExitDone);
  EXPECT_THAT(stats.out, HasSubstr("ALARM zero_boundary"));
  EXPECT_THAT(stats.out, HasSubstr("█"));
  EXPECT_THAT(stats.out, Not(HasSubstr("\x1b")));
  EXPECT_TRUE(ParseOut(Run({"stats", "job-1", "--json"}))["boundaries"][0]["mean"].is_null());
  EXPECT_EQ(ParseOut(Run({"shards", "job-1", "--json"}))["shards"][0]["digest"], "00ff");
  EXPECT_EQ(Run({"check", "job-1"}).code, kExitDone);
  server_.features.damage = true;
  const Outcome damaged = Run({"check", "job-1"});
  EXPECT_EQ(damaged.code, kExitFailed);
  EXPECT_THAT(damaged.out, HasSubstr("s3"));
}

TEST_F(CliTest, TokensPrintsALineEachAndRefusalsExitWithThree) {
  const std::string file = Write("t.jsonl",
                                 "{\"id\":\"a\",\"input_ids\":[5,6],\"loss_mask\":[0,1]}\n"
                                 "{\"id\":\"b\",\"prompt\":\"refuse\"}\n");
  const Outcome json = Run({"tokens", file, "--json"});
  EXPECT_EQ(json.code, kExitRejected);
  EXPECT_EQ(json.out,
            "{\"id\":\"a\",\"text\":\"<5><6>\",\"input_ids\":[5,6],\"loss_mask\":[0,1]}\n"
            "{\"id\":\"b\",\"error\":\"refused by the template\"}\n");
  EXPECT_THAT(Run({"tokens", file}).out, HasSubstr("<5>⟦<6>⟧"));
  EXPECT_THAT(RunAt(server_.address(), {"tokens", file}, {.out = true}).out,
              HasSubstr("<5>\x1b[32m<6>\x1b[39m"));
  EXPECT_THAT(Run({"tokens", file, "--ids"}).out, HasSubstr("<5>‹5›⟦<6>‹6›⟧"));
}

TEST_F(CliTest, TokensOfALocalModelNeedNoServer) {
  const std::string file =
      Write("chat.jsonl",
            "{\"id\":\"c\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},"
            "{\"role\":\"assistant\",\"content\":\"yo <|im_end|>\"}]}\n");
  const std::string model = STATETAP_SOURCE_DIR "/models/tiny-kimi";
  const Outcome outcome = RunAt("127.0.0.1:1", {"tokens", file, "--model", model, "--json"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  const Json json = ParseOut(outcome);
  EXPECT_EQ(json["id"], "c");
  EXPECT_THAT(json["text"].get<std::string>(), HasSubstr("<|im_user|>user<|im_middle|>hi"));
  ASSERT_EQ(json["input_ids"].size(), json["loss_mask"].size());
  EXPECT_EQ(json["loss_mask"].front(), 0);
  EXPECT_EQ(json["loss_mask"].back(), 1) << "the answer's end is learned";
  const Outcome generate =
      RunAt("127.0.0.1:1", {"tokens", file, "--model", model, "--json", "--mode", "generate"});
  for (const Json& bit : ParseOut(generate)["loss_mask"]) EXPECT_EQ(bit, 0);
}

TEST_F(CliTest, AskStreamsTheAnswer) {
  const Outcome outcome = Run({"ask", "Capital of Serbia?", "--system", "Be \"brief\"."});
  EXPECT_EQ(outcome.code, kExitDone);
  EXPECT_EQ(outcome.out, "Belgrade\n");
  EXPECT_THAT(outcome.err, HasSubstr("4.0 tok/s"));
  EXPECT_EQ(server_.model.asked, R"([{"role":"system","content":"Be \"brief\"."},)"
                                 R"({"role":"user","content":"Capital of Serbia?"}])");
  EXPECT_EQ(ParseOut(Run({"ask", "x", "--json"}))["text"], "Belgrade");
}

TEST_F(CliTest, AShuffledStreamSaysWhatItWaitsFor) {
  const std::string out = (dir_ / "copy").string();
  server_.jobs.boundaries = {1, 2};
  server_.jobs.end_state = v1::JOB_STATE_PAUSED;
  Run({"submit", Prompts(1)});
  EXPECT_THAT(Run({"stream", "job-1", "--out", out, "--shuffle", "7"}).err,
              HasSubstr("begins when its jobs have ended: job-1 is paused"));
  EXPECT_THAT(Run({"stream", "job-1", "--out", out}).err, Not(HasSubstr("shuffled")));
}

TEST_F(CliTest, StreamCopiesIntoShardsAndResumes) {
  const std::string out = (dir_ / "copy").string();
  server_.jobs.boundaries = {1, 2};
  Run({"submit", Prompts(1)});
  server_.features.num_samples = 3;
  server_.features.break_at_once = 1;
  const Outcome first = Run({"stream", "job-1", "--out", out, "--json"});
  ASSERT_EQ(first.code, kExitDone) << first.err;
  EXPECT_THAT(first.err, HasSubstr("lost the server; trying again"));
  EXPECT_EQ(ParseOut(first)["samples"], 3);
  server_.features.num_samples = 5;
  const Outcome more = Run({"stream", "job-1", "--out", out, "--json"});
  ASSERT_EQ(more.code, kExitDone) << more.err;
  EXPECT_EQ(ParseOut(more)["samples"], 2);
  // A server that forgot the acknowledgements sends all again; what is here is not written twice.
  server_.features.acked = 0;
  EXPECT_EQ(ParseOut(Run({"stream", "job-1", "--out", out, "--json"}))["samples"], 0);
  EXPECT_EQ(server_.features.acked, 5u);

  EXPECT_EQ(Run({"stream", "job-1", "--out", out, "--group", "other"}).code, kExitUsage);

  const Json samples = ParseOut(RunAt("127.0.0.1:1", {"samples", out, "--json"}));
  ASSERT_EQ(samples["samples"].size(), 5u);
  EXPECT_EQ(samples["samples"][4]["id"], "s4");
  EXPECT_EQ(samples["samples"][4]["tokens"], 7);
  EXPECT_EQ(samples["samples"][4]["supervised_tokens"], 6);
  EXPECT_EQ(samples["samples"][4]["mean_logprob"], -0.5);
  EXPECT_EQ(RunAt("127.0.0.1:1", {"check", out}).code, kExitDone);
  EXPECT_EQ(ParseOut(RunAt("127.0.0.1:1", {"stats", out, "--json"}))["rows"], 25);
  EXPECT_EQ(ParseOut(RunAt("127.0.0.1:1", {"shards", out, "--json"}))["shards"].size(), 2u);
  const Outcome view = RunAt("127.0.0.1:1", {"view", out, "s3", "--json"});
  ASSERT_EQ(view.code, kExitDone) << view.err;
  EXPECT_EQ(ParseOut(view)["input_ids"].size(), 6u);
  EXPECT_EQ(ParseOut(view)["norms"]["2"].size(), 6u);
}

TEST_F(CliTest, ADamagedLocalShardFailsTheCheckAndNamesTheSample) {
  server_.jobs.boundaries = {1, 2};
  Run({"submit", Prompts(1)});
  const std::string out = (dir_ / "copy").string();
  ASSERT_EQ(Run({"stream", "job-1", "--out", out}).code, kExitDone);
  const std::string shard = out + "/job-1-00000.h5";
  // Finds the last sample's states of boundary 2 in the file and flips a bit.
  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  const std::vector<uint16_t> states = testing::FakeFeatures::StatesOf(4, 2);
  const size_t at =
      bytes.rfind(std::string(reinterpret_cast<const char*>(states.data()), states.size() * 2));
  ASSERT_NE(at, std::string::npos);
  file.seekp(static_cast<std::streamoff>(at + 11));
  file.put(static_cast<char>(bytes[at + 11] ^ 4));
  file.close();
  const Outcome check = RunAt("127.0.0.1:1", {"check", shard});
  EXPECT_EQ(check.code, kExitFailed);
  EXPECT_THAT(check.out, HasSubstr("s4"));
  EXPECT_THAT(check.out, HasSubstr("DAMAGED"));
}

TEST_F(CliTest, ViewShowsAStoredSampleOfTheServer) {
  const Outcome outcome = Run({"view", "job-1", "s1"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("<101>⟦<101><101><101>⟧"));
  EXPECT_THAT(outcome.out, HasSubstr("norm 2"));
  EXPECT_THAT(outcome.out, HasSubstr("-0.500"));
  EXPECT_EQ(Run({"view", "job-1", "none"}).code, kExitFailed);
  EXPECT_EQ(Run({"view", "job-1"}).code, kExitUsage);
}

TEST_F(CliTest, MakeCheckpointWritesAFolder) {
  const std::string folder = (dir_ / "made").string();
  const Outcome outcome = Run({"make-checkpoint", folder, "--layers", "2", "--json"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(folder + "/config.json"));
  EXPECT_NE(Run({"make-checkpoint", folder}).code, kExitDone) << "the folder is not empty";
}

TEST_F(CliTest, AnInterruptEndsTheWaitWithAHint) {
  std::ostringstream out, err;
  Context context(out, err, {});
  context.server = server_.address();
  context.Interrupt();
  EXPECT_EQ(RunApp({"watch", "job-1"}, context), kExitInterrupted);
  EXPECT_THAT(err.str(), HasSubstr("the job goes on"));
}

TEST_F(CliTest, VerifyExitsWithOneOnFaultsAndNotOnWarnings) {
  testing::EditableDrafter drafter;
  drafter.Write(dir_ / "drafter");
  const std::string folder = (dir_ / "drafter").string();
  const Outcome sound = Run({"verify", "drafter", folder, "--json"});
  EXPECT_EQ(sound.code, kExitDone);
  EXPECT_EQ(ParseOut(sound)["faults"], 0);
  EXPECT_EQ(ParseOut(sound)["warnings"], 1);  // which numbering the taps have
  drafter.tensors.erase("norm.weight");
  drafter.Write(dir_ / "drafter");
  const Outcome spoilt = Run({"verify", "drafter", folder});
  EXPECT_EQ(spoilt.code, kExitFailed);
  EXPECT_THAT(spoilt.out, HasSubstr("FAULT"));
  EXPECT_THAT(spoilt.out, HasSubstr("1 fault\n"));

  testing::EditableCheckpoint().Write(dir_ / "base");
  const std::string base = (dir_ / "base").string();
  EXPECT_EQ(Run({"verify", "checkpoint", base, "--deep"}).code, kExitDone);
  const Outcome against = Run({"verify", "drafter", folder, "--against", base, "--json"});
  EXPECT_EQ(against.code, kExitFailed);
  EXPECT_THAT(against.out, HasSubstr("target's hidden"));
  std::filesystem::resize_file(dir_ / "base/model.safetensors", 100);
  EXPECT_EQ(Run({"verify", "checkpoint", base}).code, kExitFailed);

  EXPECT_EQ(Run({"verify", "drafter", folder, "--deep"}).code, kExitUsage);
  EXPECT_EQ(Run({"verify", "checkpoint", base, "--for", "vllm"}).code, kExitUsage);
  EXPECT_EQ(Run({"verify", "drafter", (dir_ / "nothing").string()}).code, kExitFailed);
}

TEST_F(CliTest, TheReportIsOneFileThatNeedsNoOther) {
  ASSERT_EQ(Run({"submit", Prompts(1)}).code, kExitDone);
  const std::string file = (dir_ / "report.html").string();
  EXPECT_EQ(Run({"stats", "job-1", "--html", file}).code, kExitDone);
  const std::string report = *ReadWholeFile(file);
  EXPECT_THAT(report, HasSubstr("<svg"));
  EXPECT_THAT(report, HasSubstr("zero_boundary"));
  for (const char* reference : {"src=", "href=", "url(", "@import"})
    EXPECT_THAT(report, Not(HasSubstr(reference)));
  EXPECT_EQ(Run({"stats", "job-1", "--html", (dir_ / "none/report.html").string()}).code,
            kExitFailed);
}

}  // namespace
}  // namespace statetap
