// /metrics as Prometheus reads it, and whether its figures are true.
#include "server/web/metrics.h"

#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "tests/support/job_harness.h"

namespace statetap {
namespace {

using testing::ChatSample;
using testing::FakeEngine;
using testing::JobHarness;
using testing::kHidden;

// Series by name and labels. Fails where a line is none of HELP, TYPE and series, in that order.
std::map<std::string, double> Read(const std::string& text) {
  std::map<std::string, double> values;
  std::set<std::string> announced;
  std::string name;
  const std::string label = R"re([a-z_]+="([^"\\]|\\["\\n])*")re";
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, std::regex("# HELP (statetap_[a-z_]+) .+"))) {
      name = match[1];
      EXPECT_TRUE(announced.insert(name).second) << "twice: " << name;
      EXPECT_TRUE(std::getline(lines, line));
      EXPECT_TRUE(std::regex_match(line, std::regex("# TYPE " + name + " (gauge|counter)")))
          << line;
      EXPECT_EQ(line.ends_with("counter"), name.ends_with("_total")) << line;
    } else if (std::regex_match(
                   line, match,
                   std::regex("(" + name + "(\\{" + label + "(," + label + ")*\\})?) (\\S+)"))) {
      EXPECT_TRUE(values.emplace(match[1], std::stod(match[6])).second) << "twice: " << line;
    } else {
      ADD_FAILURE() << "after " << name << ": " << line;
    }
  }
  return values;
}

TEST(MetricsTest, FiguresAreTrueAndPrometheusReadsThem) {
  JobHarness harness;
  harness.Run();
  std::vector<v1::SampleInput> samples;
  for (int i = 0; i < 6; ++i) samples.push_back(ChatSample(fmt::format("c{}", i), "Question"));
  samples.push_back(ChatSample("refused", "Question"));
  samples.back().set_temperature(-1);
  v1::JobOptions options;
  options.set_mode(v1::JOB_MODE_GENERATE);
  options.add_taps(2);  // and the last boundary
  ASSERT_OK_AND_ASSIGN(JobRecord job, harness.Submit(options, samples));
  job = harness.WaitForEnd(job);
  const std::string group = "a \"group\"\\\n";
  ASSERT_OK(harness.store->Acknowledge(job.key, group, std::vector<int64_t>{0, 3}));
  Metrics metrics(*harness.store, *harness.runner, harness.model, harness.folders(),
                  *harness.engine);
  ASSERT_OK_AND_ASSIGN(const std::string text, metrics.Text());
  const auto values = Read(text);
  EXPECT_EQ(values.at("statetap_samples{state=\"stored\"}"), 6);
  EXPECT_EQ(values.at("statetap_rejected_samples{reason=\"input\"}"), 1);
  EXPECT_EQ(values.at("statetap_tokens_total{phase=\"answer\"}"),
            static_cast<double>(job.generated));
  EXPECT_EQ(values.at("statetap_tokens_total{phase=\"prompt\"}"),
            static_cast<double>(job.tokens - job.generated));
  EXPECT_EQ(values.at("statetap_running_samples"), 0);
  EXPECT_FALSE(text.find("gpu_memory") != text.npos);  // a CPU has none

  const std::string labels = fmt::format(R"({{job="{}",group="a \"group\"\\\n"}})", job.id);
  EXPECT_EQ(values.at("statetap_reader_lag_samples" + labels), 4);
  const auto rows_left = [&] {
    double rows = 0;
    const auto left = harness.store->InStoredOrder(job.key, group, 0, -1, 100);
    for (const IndexedSample& sample : *left)
      rows += sample.acknowledged ? 0 : static_cast<double>(sample.rows);
    return rows;
  };
  constexpr double kRowBytes = 2 * kHidden * sizeof(uint16_t);
  EXPECT_EQ(values.at("statetap_reader_lag_bytes" + labels), rows_left() * kRowBytes);
  // Seen the next time, not what was read before.
  ASSERT_OK(harness.store->Acknowledge(job.key, group, std::vector<int64_t>{1}));
  ASSERT_OK(
      harness.store->MarkExcluded(job.key, std::vector<int64_t>{2}, JobStore::Exclusion::kExclude)
          .status());
  ASSERT_OK_AND_ASSIGN(const std::string later, metrics.Text());
  EXPECT_EQ(Read(later).at("statetap_reader_lag_samples" + labels), 2);
  EXPECT_EQ(Read(later).at("statetap_reader_lag_bytes" + labels), rows_left() * kRowBytes);
  ASSERT_OK(harness.runner->Delete(job));
  ASSERT_OK_AND_ASSIGN(const std::string gone, metrics.Text());
  EXPECT_FALSE(Read(gone).contains("statetap_reader_lag_samples" + labels));
}

TEST(MetricsTest, GpuMemoryIsARanks) {
  struct TwoGpus final : FakeEngine {
    TwoGpus() : FakeEngine(kHidden, 16, 16) {
      options_.backend = "cuda";
      info_.ranks = {{70, 4, 2, 1, 9}, {69, 4, 2, 1, 9}};
    }
  } engine;
  JobHarness harness;
  harness.Run();
  Metrics metrics(*harness.store, *harness.runner, harness.model, harness.folders(), engine);
  ASSERT_OK_AND_ASSIGN(const std::string text, metrics.Text());
  const auto values = Read(text);
  EXPECT_EQ(values.at("statetap_gpu_memory_bytes{rank=\"1\",use=\"weights\"}"), 69);
  EXPECT_EQ(values.at("statetap_gpu_memory_bytes{rank=\"0\",use=\"kv_cache\"}"), 4);
}

}  // namespace
}  // namespace statetap
