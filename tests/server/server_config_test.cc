#include <unistd.h>

#include <fstream>
#include <regex>

#include "server/config.h"
#include "server/server.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_kimi.h"

namespace statetap {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

TEST(DataFolderLockTest, SecondServerIsToldWhoHasIt) {
  testing::TempDir dir;
  {
    ASSERT_OK_AND_ASSIGN(const auto lock, DataFolderLock::Acquire(dir.path()));
    EXPECT_THAT(
        DataFolderLock::Acquire(dir.path()).status(),
        StatusIs(absl::StatusCode::kFailedPrecondition, fmt::format("process id {}", getpid())));
  }
  EXPECT_OK(DataFolderLock::Acquire(dir.path()));
}

ParsedArguments Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "statetapd");
  return ParseArguments(static_cast<int>(arguments.size()), arguments.data());
}

TEST(ServerConfigTest, FlagsAndFileGiveTheSame) {
  testing::TempDir dir;
  std::ofstream(dir / "config") << "model = \"m\"\ndata = \"d\"\nmax-batch-tokens = 77\ntp = 2\n";
  const std::string file = dir / "config";
  const ParsedArguments parsed = Parse({"--config", file.c_str(), "--kv-cache-gib", "0.5"});
  ASSERT_TRUE(parsed.config) << parsed.text;
  EXPECT_EQ(parsed.config->model, "m");
  EXPECT_EQ(parsed.config->engine.max_batch_tokens, 77);
  EXPECT_EQ(parsed.config->engine.ranks, 2);
  EXPECT_EQ(parsed.config->engine.kv_cache_bytes, int64_t{1} << 29);
  const ParsedArguments flags = Parse(
      {"--model", "m", "--data", "d", "--shards", "a,b", "--http", "", "--experts", "tensor"});
  ASSERT_TRUE(flags.config) << flags.text;
  EXPECT_EQ(flags.config->shards.size(), 2u);
  EXPECT_TRUE(flags.config->http.empty());
  EXPECT_EQ(flags.config->engine.experts, EngineOptions::Experts::kTensor);
  EXPECT_EQ(flags.config->engine.max_batch_tokens, 0);  // as suits the backend
  EXPECT_EQ(flags.config->engine.kv_cache_bytes, 0);
}

TEST(ServerConfigTest, AWrongNameInAFileIsNamedWithWhatIsNear) {
  testing::TempDir dir;
  std::ofstream(dir / "config") << "modle = \"m\"\ndata = \"d\"\n";
  const std::string file = dir / "config";
  const ParsedArguments parsed = Parse({"--config", file.c_str(), "--model", "m"});
  EXPECT_FALSE(parsed.config);
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_THAT(parsed.text, HasSubstr("--config: modle is not known, did you mean model?"));
}

TEST(ServerConfigTest, WrongUsageExitsWithTwoAndSaysWhatIsNear) {
  const auto wrong = [](std::vector<const char*> arguments, std::string_view part) {
    const ParsedArguments parsed = Parse(std::move(arguments));
    EXPECT_FALSE(parsed.config);
    EXPECT_EQ(parsed.exit_code, 2);
    EXPECT_THAT(parsed.text, HasSubstr(std::string(part)));
  };
  wrong({"--modle", "m", "--data", "d"}, "did you mean --model?");
  wrong({"--model", "m", "--data", "d", "--max-batch-token", "4"}, "--max-batch-tokens?");
  wrong({"--model", "m"}, "--data");
  wrong({"--model", "m", "--data", "d", "--tp", "0"}, "--tp");
  wrong({"--model", "m", "--data", "d", "--listen", "nowhere"}, "--listen");
  wrong({"--model", "m", "--data", "d", "--backend", "tpu"}, "--backend");
  wrong({"--model", "m", "--data", "d", "--engine-failure", "restart"}, "--engine-failure");
  for (const char* flag : {"--inner-eps", "--kv-cache-gib", "--host-buffer-gib"}) {
    for (const char* value : {"nan", "inf", "-inf", "0", "-1", "1e300", "x"})
      wrong({"--model", "m", "--data", "d", flag, value}, flag);
  }
  EXPECT_EQ(Parse({"--help"}).exit_code, 0);
  EXPECT_THAT(Parse({"--help"}).text, HasSubstr("--drain-seconds"));
}

// The settings of a file in deploy/config, those behind a comment sign among them: `# name = …`.
std::vector<std::string> SettingsOf(const std::filesystem::path& file) {
  std::vector<std::string> settings;
  std::ifstream lines(file);
  static const std::regex kSetting("(# )?([a-z][a-z-]* = .+)");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, kSetting)) settings.push_back(match[2]);
  }
  return settings;
}

TEST(DeployConfigTest, EveryFileAndEverySettingInItIsUnderstood) {
  testing::TempDir dir;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::Root() / "deploy/config")) {
    SCOPED_TRACE(entry.path().string());
    ++files;
    const ParsedArguments whole = Parse({"--config", entry.path().c_str()});
    ASSERT_TRUE(whole.config) << whole.text;
    EXPECT_FALSE(whole.config->model.empty());
    EXPECT_FALSE(whole.config->data.empty());
    for (const std::string& setting : SettingsOf(entry.path())) {
      const std::string one = dir / "one.toml";
      std::ofstream(one) << setting << "\n";
      const ParsedArguments parsed =  // what is required comes from here, or from the setting
          setting.starts_with("model") || setting.starts_with("data")
              ? whole
              : Parse({"--config", one.c_str(), "--model", "m", "--data", "d"});
      EXPECT_TRUE(parsed.config) << setting << ": " << parsed.text;
    }
  }
  EXPECT_GE(files, 2);
}

TEST(DeployConfigTest, KimiOnEightGpusIsWhatTheFileSays) {
  const std::string file = testing::Root() / "deploy/config/kimi-k2.5-8xh200.toml";
  const ParsedArguments parsed = Parse({"--config", file.c_str()});
  ASSERT_TRUE(parsed.config) << parsed.text;
  EXPECT_EQ(parsed.config->engine.ranks, 8);
  EXPECT_EQ(parsed.config->engine.max_batch_tokens, 16384);
  EXPECT_EQ(parsed.config->engine.kv_cache_bytes, int64_t{320} << 30);
  EXPECT_EQ(parsed.config->shards.size(), 2u);
}

}  // namespace
}  // namespace statetap
