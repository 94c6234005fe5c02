#include "extractor/shard/shard_writer.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "extractor/shard/bulk.h"
#include "extractor/shard/fp8.h"
#include "extractor/shard/shard_reader.h"
#include "tests/shard/sample_maker.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using ::testing::ElementsAre;
using testing::FileBytes;
using ::testing::IsEmpty;
using testing::MakeSample;
using testing::MakeShardConfig;
using testing::StatusIs;
using testing::TempDir;
using testing::TestSample;
using testing::WriteShard;

std::vector<std::string> FilesIn(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  return names;
}

void ExpectSame(const ShardReader& reader, int64_t index, const TestSample& sample) {
  ASSERT_OK_AND_ASSIGN(const SampleRecord record, reader.ReadRecord(index));
  const SampleRecord& wanted = sample.record;
  EXPECT_EQ(record.id, wanted.id);
  EXPECT_EQ(record.source, wanted.source);
  EXPECT_EQ(record.meta_json, wanted.meta_json);
  EXPECT_EQ(record.split, wanted.split);
  EXPECT_EQ(record.digest, wanted.digest);
  EXPECT_EQ(record.finish_reason, wanted.finish_reason);
  EXPECT_EQ(record.input_ids, wanted.input_ids);
  EXPECT_EQ(record.loss_mask, wanted.loss_mask);
  EXPECT_EQ(record.logprobs, wanted.logprobs);
  EXPECT_EQ(record.entropies, wanted.entropies);
  EXPECT_EQ(record.prompt_tokens, wanted.prompt_tokens);
  EXPECT_EQ(record.truncated, wanted.truncated);
  EXPECT_EQ(record.source_index, wanted.source_index);
  const SampleEntry& entry = reader.samples()[static_cast<size_t>(index)];
  EXPECT_EQ(entry.checksum, SampleChecksum(wanted, sample.spans()));
  for (size_t b = 0; b < sample.states.size(); ++b) {
    std::vector<uint16_t> rows(sample.states[b].size());
    ASSERT_OK(reader.ReadStates(static_cast<int>(b), entry.first_row, rows));
    EXPECT_EQ(rows, sample.states[b]) << "boundary index " << b;
  }
}

// hidden, rows a chunk, tokens of each sample.
struct Shape {
  int hidden;
  int rows_per_chunk;
  std::vector<int> tokens;
};
class ShardRoundTripTest : public ::testing::TestWithParam<Shape> {};

TEST_P(ShardRoundTripTest, EveryValueComesBack) {
  const TempDir folder;
  const Shape& shape = GetParam();
  const ShardConfig config = MakeShardConfig(shape.hidden, {0, 2, 5, 8});
  std::vector<TestSample> samples;
  int64_t rows = 0;
  for (const int tokens : shape.tokens) {
    samples.push_back(MakeSample(config, tokens, static_cast<uint32_t>(samples.size() + 1)));
    rows += tokens;
  }
  ASSERT_OK_AND_ASSIGN(const ShardSummary summary,
                       WriteShard(folder / "a.h5", config, samples,
                                  {.rows_per_chunk = shape.rows_per_chunk,
                                   .read_back = ShardWriter::ReadBack::kAll}));
  EXPECT_THAT(FilesIn(folder.path()), ElementsAre("a.h5"));
  EXPECT_EQ(summary.rows, rows);
  EXPECT_EQ(summary.samples, static_cast<int64_t>(samples.size()));
  EXPECT_EQ(summary.bytes, static_cast<int64_t>(std::filesystem::file_size(folder / "a.h5")));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  EXPECT_EQ(reader->rows(), rows);
  EXPECT_EQ(reader->digest(), summary.digest);
  ASSERT_EQ(reader->samples().size(), samples.size());
  for (size_t i = 0; i < samples.size(); ++i)
    ExpectSame(*reader, static_cast<int64_t>(i), samples[i]);
  ASSERT_OK_AND_ASSIGN(const auto damaged, reader->Verify());
  EXPECT_THAT(damaged, IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShardRoundTripTest,
                         ::testing::Values(Shape{128, 16, {1}}, Shape{128, 16, {2}},
                                           Shape{128, 16, {15}}, Shape{128, 16, {16}},
                                           Shape{128, 16, {17}}, Shape{128, 16, {1, 2, 13, 40, 3}},
                                           Shape{128, 0, {1, 200, 4096}},
                                           Shape{7168, 2, {1, 1, 3, 5}}, Shape{7168, 0, {1, 149}},
                                           Shape{100, 0, {3, 50}}, Shape{1, 0, {1, 20000, 2}}),
                         [](const auto& info) { return std::to_string(info.index); });

TEST(ShardWriterTest, ConfigComesBack) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 8});
  const std::vector<TestSample> samples = {MakeSample(config, 3, 1)};
  ASSERT_OK(WriteShard(folder / "a.h5", config, samples));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  const ShardConfig& found = reader->config();
  EXPECT_EQ(found.job, config.job);
  EXPECT_EQ(found.model_name, config.model_name);
  EXPECT_EQ(found.model_digest, config.model_digest);
  EXPECT_EQ(found.quantization, config.quantization);
  EXPECT_EQ(found.hidden, config.hidden);
  EXPECT_EQ(found.layers, config.layers);
  EXPECT_EQ(found.boundaries, config.boundaries);
  EXPECT_EQ(found.rms_norm_eps, config.rms_norm_eps);
  EXPECT_EQ(found.inner_eps, config.inner_eps);
  EXPECT_EQ(found.rope_json, config.rope_json);
  EXPECT_EQ(found.tokenizer_digest, config.tokenizer_digest);
  EXPECT_EQ(found.template_name, config.template_name);
  EXPECT_EQ(found.template_digest, config.template_digest);
  EXPECT_EQ(found.thinking, config.thinking);
  EXPECT_EQ(found.first_special, config.first_special);
  EXPECT_EQ(found.think_token, config.think_token);
  EXPECT_EQ(found.think_end_token, config.think_end_token);
  EXPECT_EQ(found.options_json, config.options_json);
  EXPECT_EQ(found.producer, config.producer);
}

TEST(ShardWriterTest, OnlyTheFinalBoundaryIsAShardToo) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(64, {8});
  const std::vector<TestSample> samples = {MakeSample(config, 3, 1)};
  ASSERT_OK(WriteShard(folder / "a.h5", config, samples));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  ExpectSame(*reader, 0, samples[0]);
}

TEST(ShardWriterTest, OptionsLargerThanAnHdf5HeaderMessageComeBack) {
  const TempDir folder;
  ShardConfig config = MakeShardConfig(64, {1});
  config.options_json = R"({"note":")" + std::string(200000, 'x') + "\"}";
  const std::vector<TestSample> samples = {MakeSample(config, 3, 1)};
  ASSERT_OK(WriteShard(folder / "a.h5", config, samples));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  EXPECT_EQ(reader->config().options_json, config.options_json);
}

TEST(ShardWriterTest, AnyUnicodeAndEmptyTextComesBack) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(64, {1, 8});
  TestSample odd = MakeSample(config, 2, 1);
  odd.record.id = "样本/η#2 \xF0\x9F\x8C\x8A \n\t\"";
  odd.record.source = "données.jsonl";
  odd.record.meta_json = R"({"título":"señal","ok":true,"n":null})";
  odd.record.split = "eval";
  odd.record.truncated = true;
  TestSample empty = MakeSample(config, 1, 2);
  empty.record.id = empty.record.source = empty.record.meta_json = empty.record.digest = "";
  empty.record.finish_reason = "";
  TestSample huge = MakeSample(config, 1, 3);
  huge.record.meta_json = R"({"text":")" + std::string(300000, 'y') + "\"}";
  const std::vector<TestSample> samples = {odd, empty, huge};
  ASSERT_OK(WriteShard(folder / "a.h5", config, samples));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  for (size_t i = 0; i < samples.size(); ++i)
    ExpectSame(*reader, static_cast<int64_t>(i), samples[i]);
}

TEST(ShardWriterTest, AbsentLogprobsAreStoredAsNan) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(64, {1});
  TestSample sample = MakeSample(config, 5, 1);
  sample.record.logprobs.clear();
  sample.record.entropies.clear();
  ASSERT_OK(WriteShard(folder / "a.h5", config, std::span(&sample, 1)));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  ASSERT_OK_AND_ASSIGN(const SampleRecord record, reader->ReadRecord(0));
  EXPECT_THAT(record.logprobs, ::testing::Each(::testing::IsNan()));
  EXPECT_EQ(record.logprobs.size(), 5u);
  EXPECT_THAT(record.entropies, ::testing::Each(::testing::IsNan()));
  ASSERT_OK_AND_ASSIGN(const auto damaged, reader->Verify());
  EXPECT_THAT(damaged, IsEmpty());
}

TEST(ShardWriterTest, Fp8StatesComeBackRoundedAndSayByHowMuch) {
  const TempDir folder;
  for (const int hidden : {1, 100, 128, 7168}) {
    ShardConfig config = MakeShardConfig(hidden, {0, 2, 8});
    config.dtype = StatesDtype::kFp8;
    std::vector<TestSample> samples;
    for (const int tokens : {1, 17, 300}) {
      samples.push_back(MakeSample(config, tokens, static_cast<uint32_t>(samples.size() + 1)));
      for (size_t c = 0; c < static_cast<size_t>(hidden); ++c) samples.back().states[1][c] = 0;
    }
    const std::string name = fmt::format("{}.h5", hidden);
    ASSERT_OK_AND_ASSIGN(
        const ShardSummary summary,
        WriteShard(folder / name, config, samples, {.read_back = ShardWriter::ReadBack::kAll}));
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / name));
    EXPECT_EQ(reader->config().dtype, StatesDtype::kFp8);
    EXPECT_EQ(reader->digest(), summary.digest);
    std::vector<double> error(3), squares(3);
    for (size_t i = 0; i < samples.size(); ++i) {
      TestSample rounded = samples[i];
      for (size_t b = 0; b < 3; ++b) {
        for (size_t at = 0; at < rounded.states[b].size(); at += static_cast<size_t>(hidden)) {
          const auto row = std::span(rounded.states[b]).subspan(at, static_cast<size_t>(hidden));
          std::vector<uint8_t> codes(row.size());
          EncodeFp8Row(row, codes, row);
        }
        for (size_t at = 0; at < rounded.states[b].size(); ++at) {
          const double was = double{Bf16ToFloat(samples[i].states[b][at])};
          const double is = double{Bf16ToFloat(rounded.states[b][at])};
          error[b] += (was - is) * (was - is);
          squares[b] += was * was;
        }
      }
      ExpectSame(*reader, static_cast<int64_t>(i), rounded);  // its checksum too
    }
    ASSERT_OK_AND_ASSIGN(const auto damaged, reader->Verify());
    EXPECT_THAT(damaged, IsEmpty());
    ASSERT_OK_AND_ASSIGN(const auto statistics, reader->ReadStatistics());
    for (size_t b = 0; b < 3; ++b) {
      const double relative = std::sqrt(error[b] / squares[b]);
      EXPECT_NEAR(statistics[b].RelativeError(), relative, 1e-9 * relative);
      EXPECT_LT(relative, 0.04);  // half a step of 1/8, over values spread in a binade: 0.026
    }
    // A copy of what was read is the same to the last bit of what readers see.
    std::vector<TestSample> copies = samples;
    for (size_t i = 0; i < copies.size(); ++i) {
      for (size_t b = 0; b < 3; ++b) {
        ASSERT_OK(reader->ReadStates(static_cast<int>(b), reader->samples()[i].first_row,
                                     copies[i].states[b]));
      }
    }
    ASSERT_OK_AND_ASSIGN(const ShardSummary copied,
                         WriteShard(folder / ("copy-" + name), config, copies));
    EXPECT_EQ(copied.digest, summary.digest);
  }
}

TEST(ShardWriterTest, AShardWithoutStatesKeepsTokensAndStatistics) {
  const TempDir folder;
  ShardConfig config = MakeShardConfig(128, {2, 8});
  std::vector<TestSample> samples = {MakeSample(config, 3, 1), MakeSample(config, 40, 2)};
  ASSERT_OK(WriteShard(folder / "a.h5", config, samples));
  ASSERT_OK_AND_ASSIGN(const auto whole, ShardReader::Open(folder / "a.h5"));
  ASSERT_OK_AND_ASSIGN(const auto statistics, whole->ReadStatistics());
  config.dtype = StatesDtype::kNone;
  for (TestSample& sample : samples) sample.states.clear();
  ASSERT_OK(WriteShard(folder / "b.h5", config, samples, {.kept_statistics = statistics}));
  ASSERT_OK_AND_ASSIGN(const auto rest, ShardReader::Open(folder / "b.h5"));
  EXPECT_THAT(rest->config().boundaries, ElementsAre(2, 8));
  EXPECT_EQ(rest->config().dtype, StatesDtype::kNone);
  EXPECT_EQ(rest->rows(), 43);
  for (int64_t i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const SampleRecord record, rest->ReadRecord(i));
    const SampleRecord& expected = samples[static_cast<size_t>(i)].record;
    EXPECT_EQ(record.input_ids, expected.input_ids);
    EXPECT_EQ(record.loss_mask, expected.loss_mask);
    EXPECT_EQ(record.logprobs, expected.logprobs);
  }
  ASSERT_OK_AND_ASSIGN(const auto damaged, rest->Verify());
  EXPECT_THAT(damaged, IsEmpty());
  ASSERT_OK_AND_ASSIGN(const auto kept, rest->ReadStatistics());
  EXPECT_EQ(kept[1].mean, statistics[1].mean);
  EXPECT_EQ(kept[1].count, 43);
  std::vector<uint16_t> row(128);
  EXPECT_THAT(rest->ReadStates(0, 0, row),
              StatusIs(absl::StatusCode::kFailedPrecondition, "evicted"));
}

TEST(ShardWriterTest, StatisticsComeBackToTheLastBit) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {1, 8});
  TestSample sample = MakeSample(config, 50, 1);
  sample.states[1][130] = 0x7f80;  // infinity in row 1
  BoundaryStatistics expected(128), with_infinity(128);
  expected.Add(sample.states[0]);
  with_infinity.Add(sample.states[1]);
  ASSERT_OK(WriteShard(folder / "a.h5", config, std::span(&sample, 1)));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  ASSERT_OK_AND_ASSIGN(const auto found, reader->ReadStatistics());
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].count, 50);
  EXPECT_EQ(found[0].mean, expected.mean);
  EXPECT_EQ(found[0].m2, expected.m2);
  EXPECT_EQ(found[0].min, expected.min);
  EXPECT_EQ(found[0].max, expected.max);
  EXPECT_EQ(found[0].abs_max, expected.abs_max);
  EXPECT_EQ(found[0].row_rms_histogram, expected.row_rms_histogram);
  EXPECT_EQ(found[1].nonfinite, 1);
  EXPECT_EQ(found[1].count, 49);
  EXPECT_EQ(found[1].mean, with_infinity.mean);
}

TEST(ShardWriterTest, StatisticsByClassComeBack) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {1, 8});
  const TestSample sample = MakeSample(config, 200, 1);
  const auto classes = TokenClassesOf(sample.record.input_ids, sample.record.loss_mask, 150000);
  BoundaryStatistics first(128), last(128);
  first.Add(sample.states[0], classes);
  last.Add(sample.states[1], classes, sample.states[0]);
  ASSERT_OK(WriteShard(folder / "a.h5", config, std::span(&sample, 1)));
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  ASSERT_OK_AND_ASSIGN(const auto found, reader->ReadStatistics());
  EXPECT_EQ(found[0].AllClasses().count, 200);
  EXPECT_EQ(found[0].AllClasses().compared, 0) << "nothing lies before the first boundary";
  EXPECT_EQ(found[1].AllClasses().compared, 200);
  for (size_t i = 0; i < kTokenClasses; ++i) {
    const ClassStatistics &got = found[1].by_class[i], &wanted = last.by_class[i];
    EXPECT_GT(got.count, 0) << i;
    EXPECT_EQ(got.count, wanted.count);
    EXPECT_EQ(got.row_rms_histogram, wanted.row_rms_histogram);
    EXPECT_EQ(got.compared, wanted.compared);
    EXPECT_EQ(got.cosine, wanted.cosine);
    EXPECT_EQ(got.squared_cosine, wanted.squared_cosine);
    EXPECT_EQ(found[0].by_class[i].count, first.by_class[i].count);
  }
}

TEST(ShardWriterTest, SameSamplesGiveTheSameBytesUnderAnyName) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 8});
  std::vector<TestSample> samples;
  for (uint32_t i = 0; i < 20; ++i)
    samples.push_back(MakeSample(config, 1 + static_cast<int>(i * 7), i));
  // The second may differ in the seconds of "created" and the digest over it; try again then.
  for (int attempt = 0; attempt < 5; ++attempt) {
    const std::string first = fmt::format("first{}.h5", attempt);
    const std::string other = fmt::format("other{}.h5", attempt);
    ASSERT_OK(WriteShard(folder / first, config, samples));
    ASSERT_OK(WriteShard(folder / other, config, samples));
    if (FileBytes(folder / first) == FileBytes(folder / other)) return;
  }
  FAIL() << "five pairs of shards with the same samples differ";
}

TEST(ShardWriterTest, UncommittedWriterLeavesNothingBehind) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 8});
  {
    ASSERT_OK_AND_ASSIGN(const auto writer, ShardWriter::Create(folder / "a.h5", config, {}));
    const TestSample sample = MakeSample(config, 100, 1);
    ASSERT_OK(writer->Append(sample.record, sample.spans()));
    EXPECT_THAT(FilesIn(folder.path()), ElementsAre("a.h5.partial"));
    EXPECT_EQ(writer->samples(), 1);
    EXPECT_EQ(writer->states_bytes(), 100 * 128 * 2 * 2);
  }
  EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
}

TEST(ShardWriterTest, AShardWithoutSamplesIsRefused) {
  const TempDir folder;
  ASSERT_OK_AND_ASSIGN(const auto writer,
                       ShardWriter::Create(folder / "a.h5", MakeShardConfig(8, {1}), {}));
  EXPECT_THAT(writer->Commit(), StatusIs(absl::StatusCode::kFailedPrecondition, "without samples"));
  EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
}

TEST(ShardWriterTest, ACommittedWriterTakesNoMore) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(8, {1});
  ASSERT_OK_AND_ASSIGN(const auto writer, ShardWriter::Create(folder / "a.h5", config, {}));
  const TestSample sample = MakeSample(config, 1, 1);
  ASSERT_OK(writer->Append(sample.record, sample.spans()));
  ASSERT_OK(writer->Commit());
  EXPECT_THAT(writer->Append(sample.record, sample.spans()),
              StatusIs(absl::StatusCode::kFailedPrecondition, "a.h5 is committed"));
  EXPECT_THAT(writer->Commit(), StatusIs(absl::StatusCode::kFailedPrecondition, "committed"));
  EXPECT_THAT(FilesIn(folder.path()), ElementsAre("a.h5"));
}

TEST(ShardWriterTest, AnExistingShardIsNeverReplaced) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(8, {1});
  const TestSample sample = MakeSample(config, 1, 1);
  ASSERT_OK_AND_ASSIGN(const auto late, ShardWriter::Create(folder / "late.h5", config, {}));
  ASSERT_OK(late->Append(sample.record, sample.spans()));
  testing::SetFileBytes(folder / "late.h5", "someone else's");
  EXPECT_THAT(late->Commit(), StatusIs(absl::StatusCode::kAlreadyExists, "late.h5"));
  EXPECT_EQ(FileBytes(folder / "late.h5"), "someone else's");
  EXPECT_THAT(ShardWriter::Create(folder / "late.h5", config, {}),
              StatusIs(absl::StatusCode::kAlreadyExists, "late.h5"));
  EXPECT_THAT(FilesIn(folder.path()), ElementsAre("late.h5"));
}

TEST(ShardWriterTest, WrongConfigsAreRefusedByField) {
  const TempDir folder;
  const auto create = [&](const ShardConfig& config) {
    return ShardWriter::Create(folder / "a.h5", config, {});
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(create(MakeShardConfig(0, {1})), StatusIs(invalid, "hidden is 0"));
  EXPECT_THAT(create(MakeShardConfig(8, {1}, 0)), StatusIs(invalid, "layers is 0"));
  EXPECT_THAT(create(MakeShardConfig(8, {})), StatusIs(invalid, "no boundaries"));
  EXPECT_THAT(create(MakeShardConfig(8, {9})), StatusIs(invalid, "boundary 9 is not in 0 to 8"));
  EXPECT_THAT(create(MakeShardConfig(8, {-1})), StatusIs(invalid, "boundary -1"));
  EXPECT_THAT(create(MakeShardConfig(8, {2, 2})), StatusIs(invalid, "boundary 2"));
  EXPECT_THAT(create(MakeShardConfig(8, {3, 2})), StatusIs(invalid, "boundary 2"));
  ShardConfig bad_text = MakeShardConfig(8, {1});
  bad_text.job = "a\x80";
  EXPECT_THAT(create(bad_text), StatusIs(invalid, "job: byte 1 is 0x80"));
  EXPECT_THAT(ShardWriter::Create(folder / "a.hdf5", MakeShardConfig(8, {1}), {}),
              StatusIs(invalid, "does not end in .h5"));
  EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
}

TEST(ShardWriterTest, SamplesThatDoNotFitAreRefusedAndTheWriterGoesOn) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(8, {1, 8});
  ASSERT_OK_AND_ASSIGN(const auto writer, ShardWriter::Create(folder / "a.h5", config, {}));
  const TestSample good = MakeSample(config, 3, 1);
  const auto expect_refused = [&](std::string_view part, auto change) {
    TestSample bad = good;
    change(bad);
    EXPECT_THAT(writer->Append(bad.record, bad.spans()),
                StatusIs(absl::StatusCode::kInvalidArgument, std::string(part)));
  };
  expect_refused("no tokens", [](TestSample& s) { s.record.input_ids.clear(); });
  expect_refused("loss_mask has 2", [](TestSample& s) { s.record.loss_mask.pop_back(); });
  expect_refused("other than 0 and 1", [](TestSample& s) { s.record.loss_mask[1] = 2; });
  expect_refused("logprobs has 4", [](TestSample& s) { s.record.logprobs.push_back(0); });
  expect_refused("entropies has 2", [](TestSample& s) { s.record.entropies.pop_back(); });
  expect_refused("states has 1", [](TestSample& s) { s.states.pop_back(); });
  expect_refused("boundary 8 has 23 values where 24",
                 [](TestSample& s) { s.states[1].pop_back(); });
  expect_refused("prompt_tokens is 4", [](TestSample& s) { s.record.prompt_tokens = 4; });
  expect_refused("split is \"test\"", [](TestSample& s) { s.record.split = "test"; });
  expect_refused("sample \"sample-1\": meta", [](TestSample& s) { s.record.meta_json = "[1]"; });
  expect_refused("source: byte 0 is 0xff", [](TestSample& s) { s.record.source = "\xff"; });
  expect_refused("id: byte 1 is 0x00", [](TestSample& s) { s.record.id = std::string("a\0b", 3); });
  expect_refused("id: byte 0 is 0xed", [](TestSample& s) { s.record.id = "\xed\xa0\x80"; });
  ASSERT_OK(writer->Append(good.record, good.spans()));
  ASSERT_OK(writer->Commit());
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(folder / "a.h5"));
  ASSERT_EQ(reader->samples().size(), 1u);
  ExpectSame(*reader, 0, good);
}

TEST(ShardWriterTest, AMissingOrUnwritableFolderIsNamed) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(8, {1});
  EXPECT_THAT(ShardWriter::Create(folder / "absent/a.h5", config, {}),
              StatusIs(absl::StatusCode::kNotFound, "absent/a.h5.partial"));
  testing::SetFileBytes(folder / "file", "");
  EXPECT_THAT(ShardWriter::Create(folder / "file/a.h5", config, {}),
              StatusIs(absl::StatusCode::kNotFound, "file/a.h5.partial"));
  // Root may write anywhere but in /proc, where the answer is another one.
  EXPECT_THAT(
      ShardWriter::Create("/proc/a.h5", config, {}),
      StatusIs(geteuid() == 0 ? absl::StatusCode::kNotFound : absl::StatusCode::kPermissionDenied,
               "/proc/a.h5.partial"));
}

// Writes beyond a limit fail as they do on a full disk, with EFBIG for ENOSPC.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    Set(bytes);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }
  void Set(rlim_t bytes) {
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }

 private:
  rlimit before_{};
};

TEST(ShardWriterTest, AFailedWriteNamesTheFileIsFinalAndLeavesNothing) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 8});
  const TestSample sample = MakeSample(config, 1000, 1);
  FileSizeLimit limit(1 << 20);
  ASSERT_OK_AND_ASSIGN(const auto writer,
                       ShardWriter::Create(folder / "a.h5", config, {.rows_per_chunk = 16}));
  absl::Status status;
  for (int i = 0; i < 10 && status.ok(); ++i)
    status = writer->Append(sample.record, sample.spans());
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "a.h5.partial"));
  EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
  limit.Set(RLIM_INFINITY);
  EXPECT_EQ(writer->Append(sample.record, sample.spans()), status);
  EXPECT_EQ(writer->Commit().status(), status);
  EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
}

// The rows fit, what Commit adds does not.
TEST(ShardWriterTest, ACommitThatRunsOutOfSpaceLeavesNothing) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 8});
  const TestSample sample = MakeSample(config, 1000, 1);
  for (const rlim_t bytes : {0, 4096, 100000, 600000}) {
    ASSERT_OK_AND_ASSIGN(const auto writer, ShardWriter::Create(folder / "a.h5", config, {}));
    ASSERT_OK(writer->Append(sample.record, sample.spans()));
    const FileSizeLimit limit(bytes);
    EXPECT_THAT(writer->Commit(), StatusIs(absl::StatusCode::kResourceExhausted, "a.h5.partial"));
    EXPECT_THAT(FilesIn(folder.path()), IsEmpty());
  }
  // The process is as good as new.
  ASSERT_OK(WriteShard(folder / "b.h5", config, std::span(&sample, 1)));
}

TEST(ShardWriterTest, WritersOfSeveralFilesWorkAtOnce) {
  const TempDir folder;
  const ShardConfig config = MakeShardConfig(128, {2, 5, 8});
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(4);
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<TestSample> samples;
      for (uint32_t i = 0; i < 10; ++i)
        samples.push_back(MakeSample(config, 1 + static_cast<int>(i * 100), 100 * t + i));
      const auto path = folder / fmt::format("{}.h5", t);
      statuses[t] = testing::StatusOf(
          WriteShard(path, config, samples, {.read_back = ShardWriter::ReadBack::kAll}));
      if (!statuses[t].ok()) return;
      const auto reader = ShardReader::Open(path);
      statuses[t] = reader.status();
      if (reader.ok()) ExpectSame(**reader, 9, samples[9]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

TEST(BulkTest, EveryChunkIsAMultipleOf4KiB) {
  for (const int hidden : {1, 7, 64, 100, 128, 1000, 7168}) {
    const int64_t rows = RowsPerChunk(2 * hidden, 1 << 20);
    EXPECT_EQ(rows * 2 * hidden % 4096, 0) << hidden;
    EXPECT_EQ(AlignedRows(2 * hidden, rows), rows) << hidden;
    EXPECT_EQ(AlignedRows(2 * hidden, 1) * 2 * hidden % 4096, 0) << hidden;
  }
  EXPECT_EQ(RowsPerChunk(2 * 7168, 1 << 20), 72);
  EXPECT_EQ(RowsPerChunk(2 * 128, 1 << 20), 4096);
}

}  // namespace
}  // namespace statetap
