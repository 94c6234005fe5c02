// A store, a fake engine and a runner in a temporary folder: what a server is made of, without the
// network. Restart() is a server that ended and started again.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "extractor/base/json.h"
#include "extractor/shard/shard_reader.h"
#include "server/jobs/admission.h"
#include "server/jobs/job_runner.h"
#include "tests/support/fake_engine.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap::testing {

inline constexpr int kHidden = 16;

// tiny-kimi's tokenizer and template before a model of 8 layers that FakeEngine stands for.
inline ServedModel FakeModel() {
  ServedModel model;
  model.name = "fake";
  model.digest = "weights-1";
  model.config.hidden = kHidden;
  model.config.num_layers = 8;
  model.config.vocab = 2304;
  model.config.rms_norm_eps = 1e-5;
  absl::StatusOr<Tokenizer> tokenizer =
      Tokenizer::Open(std::filesystem::path(STATETAP_SOURCE_DIR) / "models/tiny-kimi");
  EXPECT_OK(tokenizer);
  model.tokenizer = std::make_shared<const Tokenizer>(*std::move(tokenizer));
  model.template_kind = TemplateKind::kKimiK25;
  model.stop_ids = {2049, 2050};
  model.inner_eps = 1e-5;
  model.max_seq_len = 512;
  return model;
}

inline v1::SampleInput ChatSample(const std::string& id, const std::string& text) {
  v1::SampleInput sample;
  sample.set_id(id);
  sample.mutable_chat()->set_messages_json(
      DumpJson(Json::array({{{"role", "user"}, {"content", text}}})));
  sample.set_source("test");
  return sample;
}

inline v1::SampleInput IdsSample(const std::string& id, const std::vector<int32_t>& ids) {
  v1::SampleInput sample;
  sample.set_id(id);
  sample.mutable_tokens()->mutable_ids()->Assign(ids.begin(), ids.end());
  return sample;
}

class JobHarness {
 public:
  JobHarness() : JobHarness(JobRunner::Options{}) {}
  explicit JobHarness(JobRunner::Options options, std::vector<std::filesystem::path> shards = {})
      : options_(options), folders_(dir.path(), std::move(shards)) {
    Restart();
  }
  ~JobHarness() { runner.reset(); }

  void Stop() {
    runner.reset();
    store.reset();
  }
  void Restart() {
    Stop();
    engine = std::make_unique<FakeEngine>(kHidden, model.config.vocab, model.max_seq_len);
    auto opened = JobStore::Open(dir / "statetap.db", {.verify_counts = true});
    ASSERT_OK(opened);
    store = *std::move(opened);
  }
  void Run() {
    auto started = JobRunner::Start(*store, model, *engine, folders_, options_);
    ASSERT_OK(started);
    runner = *std::move(started);
  }

  absl::StatusOr<JobRecord> Submit(const v1::JobOptions& options,
                                   const std::vector<v1::SampleInput>& samples) {
    STATETAP_ASSIGN_OR_RETURN(Admission admission, Admission::Begin(*store, model, options));
    google::protobuf::RepeatedPtrField<v1::SampleInput> batch(samples.begin(), samples.end());
    STATETAP_RETURN_IF_ERROR(admission.Add(batch));
    STATETAP_ASSIGN_OR_RETURN(JobStore::Published published, admission.Finish());
    if (runner != nullptr && !published.existed)
      STATETAP_RETURN_IF_ERROR(runner->Submit(published.job));
    return std::move(published.job);
  }

  // Waits until `done` holds of the job; the job as it is then, or after two minutes.
  template <typename Done>
  JobRecord WaitUntil(const JobRecord& job, const Done& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (true) {
      JobRecord now = *store->GetJob(job.key);
      if (done(now) || std::chrono::steady_clock::now() > deadline) return now;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  JobRecord WaitForEnd(const JobRecord& job) {
    return WaitUntil(job, [](const JobRecord& now) { return HasEnded(now.state); });
  }

  // The buffer is given back a moment after the store's last transaction.
  int64_t BufferedInTheEnd() {
    for (int i = 0; i < 20000 && runner->buffered_bytes() != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return runner->buffered_bytes();
  }

  // Checksums of the job's stored samples by id: over ids, mask, scores and every state.
  std::map<std::string, uint64_t> Checksums(const JobRecord& job) {
    std::map<std::string, uint64_t> sums;
    const auto shards = store->Shards(job.key);
    EXPECT_OK(shards);
    for (const ShardRow& shard : *shards) {
      auto reader = ShardReader::Open(folders_.FromStored(shard.path));
      EXPECT_OK(reader);
      if (!reader.ok()) continue;
      auto damaged = (*reader)->Verify();
      EXPECT_OK(damaged);
      EXPECT_TRUE(damaged->empty());
      for (const SampleEntry& entry : (*reader)->samples()) {
        EXPECT_TRUE(sums.emplace(entry.id, entry.checksum).second) << entry.id << " twice";
      }
    }
    return sums;
  }
  const ShardFolders& folders() const { return folders_; }

  TempDir dir;
  ServedModel model = FakeModel();
  std::unique_ptr<FakeEngine> engine;
  std::unique_ptr<JobStore> store;
  std::unique_ptr<JobRunner> runner;

 private:
  JobRunner::Options options_;
  ShardFolders folders_;
};

}  // namespace statetap::testing
