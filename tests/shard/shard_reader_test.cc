#include "extractor/shard/shard_reader.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "extractor/base/digest.h"
#include "extractor/base/file.h"
#include "extractor/shard/footer.h"
#include "extractor/shard/statistics_check.h"
#include "tests/shard/sample_maker.h"
#include "tests/support/temp_dir.h"

// This program's own flock, libhdf5's too: a file system may refuse locks.
namespace {
bool locks_refused = false;
int locks_asked = 0;
}  // namespace
extern "C" int flock(int descriptor, int operation) noexcept {
  ++locks_asked;
  if (!locks_refused) return static_cast<int>(syscall(SYS_flock, descriptor, operation));
  errno = ENOLCK;
  return -1;
}

namespace statetap {
namespace {

using ::testing::ElementsAre;
using testing::FileBytes;
using ::testing::IsEmpty;
using testing::MakeSample;
using testing::MakeShardConfig;
using testing::SetFileBytes;
using testing::StatusIs;
using testing::TempDir;
using testing::TestSample;
using testing::WriteShard;

// A small shard of five samples on disk, its bytes and its chunk table.
class ShardReaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const int tokens : {3, 1, 20, 7, 2})
      samples_.push_back(MakeSample(config_, tokens, static_cast<uint32_t>(samples_.size())));
    ASSERT_OK(WriteShard(path_, config_, samples_, {.rows_per_chunk = 16}));
    bytes_ = FileBytes(path_);
    ASSERT_OK_AND_ASSIGN(const File file, File::OpenForRead(path_));
    ASSERT_OK_AND_ASSIGN(footer_, ReadFooter(file));
  }

  // The dataset whose chunk holds this byte, or null: structure or footer.
  const BulkDataset* DatasetAt(int64_t offset, int64_t* row) const {
    for (const BulkDataset& dataset : footer_.datasets) {
      for (size_t chunk = 0; chunk < dataset.chunk_offsets.size(); ++chunk) {
        const int64_t within = offset - dataset.chunk_offsets[chunk];
        if (within < 0 || within >= dataset.shape.chunk_bytes()) continue;
        *row = static_cast<int64_t>(chunk) * dataset.shape.rows_per_chunk +
               within / dataset.shape.row_bytes();
        return &dataset;
      }
    }
    return nullptr;
  }

  int64_t SampleOfRow(int64_t row) const {
    int64_t sample = 0;
    for (const TestSample& each : samples_) {
      row -= static_cast<int64_t>(each.record.input_ids.size());
      if (row < 0) return sample;
      ++sample;
    }
    return -1;
  }

  const TempDir folder_;
  const std::filesystem::path path_ = folder_ / "a.h5";
  const ShardConfig config_ = MakeShardConfig(128, {2, 5, 8});
  std::vector<TestSample> samples_;
  std::string bytes_;
  ShardFooter footer_;
};

// As docs/shard-format.md has them, so that another program can compute them.
TEST_F(ShardReaderTest, DigestsAreXxh3OfTheBytesInTheDocumentedOrder) {
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  std::string checksums;
  for (size_t i = 0; i < samples_.size(); ++i) {
    std::string bytes;
    const auto add = [&](const auto& values) {
      bytes.append(reinterpret_cast<const char*>(values.data()),
                   values.size() * sizeof(values.front()));
    };
    add(samples_[i].record.input_ids);
    add(samples_[i].record.loss_mask);
    add(samples_[i].record.logprobs);
    add(samples_[i].record.entropies);
    for (const auto& rows : samples_[i].states) add(rows);
    const uint64_t checksum = Xxh3Of(std::as_bytes(std::span(bytes)));
    EXPECT_EQ(reader->samples()[i].checksum, checksum);
    checksums.append(reinterpret_cast<const char*>(&checksum), 8);
  }
  EXPECT_EQ(reader->digest(), HexOf(Xxh3Of(std::as_bytes(std::span(checksums)))));

  std::string structure;
  for (int64_t offset = 0, row; offset < footer_.hdf5_bytes; ++offset)
    if (DatasetAt(offset, &row) == nullptr) structure += bytes_[static_cast<size_t>(offset)];
  EXPECT_EQ(footer_.structure_digest, Xxh3Of(std::as_bytes(std::span(structure))));
}

TEST_F(ShardReaderTest, AnyRangeOfRowsIsRead) {
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  std::vector<uint16_t> all;
  for (const TestSample& sample : samples_)
    all.insert(all.end(), sample.states[1].begin(), sample.states[1].end());
  for (int64_t first = 0; first <= 33; ++first) {
    for (int64_t rows = 0; rows <= 33 - first; ++rows) {
      std::vector<uint16_t> found(static_cast<size_t>(rows * 128));
      ASSERT_OK(reader->ReadStates(1, first, found));
      ASSERT_TRUE(std::ranges::equal(found, std::span(all).subspan(first * 128, rows * 128)))
          << first << " " << rows;
    }
  }
}

TEST_F(ShardReaderTest, WhatIsNotThereIsOutOfRange) {
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  std::vector<uint16_t> rows(2 * 128);
  const auto out_of_range = absl::StatusCode::kOutOfRange;
  EXPECT_THAT(reader->ReadStates(0, 32, rows),
              StatusIs(out_of_range, "2 rows from row 32 asked for"));
  EXPECT_THAT(reader->ReadStates(0, -1, rows), StatusIs(out_of_range, "from row -1"));
  EXPECT_THAT(reader->ReadStates(0, INT64_MAX, rows), StatusIs(out_of_range, "a.h5"));
  EXPECT_THAT(reader->ReadStates(3, 0, rows), StatusIs(out_of_range, "3 boundaries"));
  EXPECT_THAT(reader->ReadStates(-1, 0, rows), StatusIs(out_of_range, "index -1"));
  EXPECT_THAT(reader->ReadStates(0, 0, std::span(rows).first(100)), StatusIs(out_of_range, "a.h5"));
  EXPECT_THAT(reader->ReadRecord(5), StatusIs(out_of_range, "5 samples"));
  EXPECT_THAT(reader->ReadRecord(-1), StatusIs(out_of_range, "number -1"));
}

TEST_F(ShardReaderTest, FilesThatAreNoShardsAreRefusedByName) {
  EXPECT_THAT(ShardReader::Open(folder_ / "absent.h5"),
              StatusIs(absl::StatusCode::kNotFound, "absent.h5"));
  for (const size_t size : {0, 1, 55, 56, 4096, 100000}) {
    SetFileBytes(folder_ / "junk.h5", std::string(size, 'j'));
    EXPECT_THAT(ShardReader::Open(folder_ / "junk.h5"),
                StatusIs(absl::StatusCode::kDataLoss, "junk.h5"));
  }
  // The HDF5 part alone: what h5repack or another program leaves.
  SetFileBytes(folder_ / "plain.h5", bytes_.substr(0, footer_.hdf5_bytes));
  EXPECT_THAT(ShardReader::Open(folder_ / "plain.h5"),
              StatusIs(absl::StatusCode::kDataLoss, "plain.h5 is not a complete shard"));
}

TEST_F(ShardReaderTest, ACutOrGrownFileIsRefused) {
  for (const size_t cut : {size_t{1}, size_t{2}, size_t{55}, size_t{56}, size_t{57}, size_t{4096},
                           size_t{65536}, bytes_.size() - 1}) {
    SetFileBytes(path_, std::string_view(bytes_).substr(0, bytes_.size() - cut));
    EXPECT_THAT(ShardReader::Open(path_), StatusIs(absl::StatusCode::kDataLoss, "a.h5"))
        << "cut by " << cut;
  }
  SetFileBytes(path_, bytes_ + "x");
  EXPECT_THAT(ShardReader::Open(path_), StatusIs(absl::StatusCode::kDataLoss, "a.h5"));
}

// A page that never reached the disk: the size is right.
TEST_F(ShardReaderTest, AHoleIsNoticed) {
  int pages_with_data = 0;
  for (size_t begin = 0; begin + 4096 <= bytes_.size(); begin += 4096) {
    std::string hole = bytes_;
    std::fill_n(hole.begin() + static_cast<int64_t>(begin), 4096, '\0');
    if (hole == bytes_) continue;
    ++pages_with_data;
    SetFileBytes(path_, hole);
    const auto reader = ShardReader::Open(path_);
    if (!reader.ok()) continue;
    ASSERT_OK_AND_ASSIGN(const auto damaged, (*reader)->Verify());
    EXPECT_FALSE(damaged.empty()) << "page at " << begin;
  }
  EXPECT_GT(pages_with_data, 10);
}

// Every byte of structure and footer, one bit each, and a sweep through the rows: the file is
// refused, or Verify names exactly the sample hit, or the byte is behind a dataset's last row.
TEST_F(ShardReaderTest, EveryFlippedBitIsNoticed) {
  ASSERT_OK_AND_ASSIGN(const File file, File::OpenForWrite(path_));
  int64_t refused = 0, named = 0, unused = 0;
  for (int64_t offset = 0; offset < static_cast<int64_t>(bytes_.size());) {
    int64_t row = 0;
    const BulkDataset* dataset = DatasetAt(offset, &row);
    const char original = bytes_[static_cast<size_t>(offset)];
    const char flipped = static_cast<char>(original ^ (1 << (offset % 8)));
    ASSERT_OK(file.WriteAt(offset, std::as_bytes(std::span(&flipped, 1))));
    const auto reader = ShardReader::Open(path_);
    if (dataset == nullptr) {
      EXPECT_THAT(reader, StatusIs(absl::StatusCode::kDataLoss, "a.h5")) << "byte " << offset;
      ++refused;
    } else {
      ASSERT_TRUE(reader.ok()) << "byte " << offset << " of the rows: " << reader.status();
      ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> damaged, (*reader)->Verify());
      if (row < 33) {
        EXPECT_THAT(damaged, ElementsAre(SampleOfRow(row))) << dataset->path << " row " << row;
        ++named;
      } else {
        EXPECT_THAT(damaged, IsEmpty()) << dataset->path << " row " << row;
        ++unused;
      }
    }
    ASSERT_OK(file.WriteAt(offset, std::as_bytes(std::span(&original, 1))));
    // Structure is a few KiB with long empty stretches; the rows of one chunk are alike.
    offset += dataset == nullptr ? 5 : 131;
  }
  EXPECT_GT(refused, 3000);
  EXPECT_GT(named, 100);
  EXPECT_GT(unused, 100);
  ASSERT_OK(ShardReader::Open(path_));
}

// Chunk tables that lie under right digests, as only a hostile writer makes them: our own checks.
class HostileShardTest : public ShardReaderTest {
 protected:
  // Bytes of a file with this HDF5 part and this footer, digests computed over them.
  absl::Status Write(const std::string& hdf5_part, ShardFooter footer) const {
    SetFileBytes(path_, hdf5_part);
    STATETAP_ASSIGN_OR_RETURN(const File file, File::OpenForWrite(path_));
    footer.hdf5_bytes = static_cast<int64_t>(hdf5_part.size());
    STATETAP_ASSIGN_OR_RETURN(footer.structure_digest, StructureDigest(file, footer));
    const std::string footer_bytes = EncodeFooter(footer);
    return file.WriteAt(footer.hdf5_bytes, std::as_bytes(std::span(footer_bytes)));
  }
  std::string Hdf5Part() const { return bytes_.substr(0, footer_.hdf5_bytes); }
};

TEST_F(HostileShardTest, ARewrittenFileOpens) {
  ASSERT_OK(Write(Hdf5Part(), footer_));
  EXPECT_EQ(FileBytes(path_), bytes_);
  ASSERT_OK(ShardReader::Open(path_));
}

TEST_F(HostileShardTest, ChunkTablesThatLieAreRefused) {
  const auto expect_refused = [&](auto change) {
    ShardFooter footer = footer_;
    change(footer);
    // Not Write(): such a table cannot be digested. The table is refused before.
    footer.hdf5_bytes = footer_.hdf5_bytes;
    SetFileBytes(path_, Hdf5Part() + EncodeFooter(footer));
    const auto reader = ShardReader::Open(path_);
    EXPECT_THAT(reader, StatusIs(absl::StatusCode::kDataLoss, "chunk table is not sound"));
  };
  const auto first = [](ShardFooter& footer) -> BulkDataset& { return footer.datasets.front(); };
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets[0] = -4096; });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets[0] = INT64_MAX; });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets[0] = f.hdf5_bytes - 1; });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets[1] = first(f).chunk_offsets[0]; });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets[1] += 1; });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets.pop_back(); });
  expect_refused([&](ShardFooter& f) { first(f).chunk_offsets.push_back(0); });
  expect_refused([&](ShardFooter& f) { first(f).shape.rows = INT64_MAX; });
  expect_refused([&](ShardFooter& f) { first(f).shape.rows = -1; });
  expect_refused([&](ShardFooter& f) { first(f).shape.rows_per_chunk = 0; });
  expect_refused([&](ShardFooter& f) { first(f).shape.rows_per_chunk = INT64_MAX; });
  expect_refused([&](ShardFooter& f) { first(f).shape.width = INT64_MAX; });
  expect_refused([&](ShardFooter& f) { first(f).shape.width = -1; });
  expect_refused([&](ShardFooter& f) { first(f).path = std::string(1000, 'p'); });
  expect_refused([&](ShardFooter& f) { first(f).shape.type = static_cast<Hdf5Type>(99); });
}

TEST_F(HostileShardTest, TablesThatDisagreeWithHdf5AreRefused) {
  const auto expect_refused = [&](auto change) {
    ShardFooter footer = footer_;
    change(footer);
    ASSERT_OK(Write(Hdf5Part(), footer));
    EXPECT_THAT(ShardReader::Open(path_), StatusIs(absl::StatusCode::kDataLoss, "a.h5"));
  };
  expect_refused([](ShardFooter& f) { f.datasets.pop_back(); });
  expect_refused([](ShardFooter& f) { f.datasets.clear(); });
  expect_refused([](ShardFooter& f) { std::swap(f.datasets[0], f.datasets[1]); });
  expect_refused([](ShardFooter& f) { f.datasets[0].shape.rows = 32; });
  expect_refused([](ShardFooter& f) { f.datasets[0].path = "/states/3"; });
  expect_refused([](ShardFooter& f) { f.datasets[0].shape.width = 64; });
}

TEST_F(ShardReaderTest, StaysReadableAfterUnlinkAndInAForkedChild) {
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  std::filesystem::remove(path_);
  const auto all_there = [&] {
    const auto record = reader->ReadRecord(2);
    const auto damaged = reader->Verify();
    return record.ok() && record->input_ids == samples_[2].record.input_ids && damaged.ok() &&
           damaged->empty();
  };
  EXPECT_TRUE(all_there());
  ASSERT_OK_AND_ASSIGN(const auto statistics, reader->ReadStatistics());
  EXPECT_EQ(statistics[0].count, 33);
  const pid_t child = fork();
  if (child == 0) _exit(all_there() ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// In a mount namespace of its own, where the machine allows one.
TEST_F(ShardReaderTest, IsReadFromAReadOnlyMount) {
  constexpr int kNoMounts = 77;
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(kNoMounts);
    const char* const folder = folder_.path().c_str();
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount(folder, folder, nullptr, MS_BIND, nullptr) != 0 ||
        mount(nullptr, folder, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0)
      _exit(kNoMounts);
    const bool read_only = !File::Create(folder_ / "new").ok();
    const auto reader = ShardReader::Open(path_);
    const auto damaged = reader.ok() ? (*reader)->Verify() : reader.status();
    const bool read = damaged.ok() && damaged->empty() && (*reader)->ReadStatistics().ok();
    _exit(read_only && read ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoMounts) GTEST_SKIP() << "this machine allows no mounts";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(ShardReaderTest, IsReadAndWrittenWhereTheFileSystemRefusesLocks) {
  locks_refused = true;
  EXPECT_NE(flock(0, LOCK_SH), 0);  // ours, not the C library's
  const int before = locks_asked;
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  ASSERT_OK(reader->ReadStatistics().status());
  ASSERT_OK(WriteShard(folder_ / "b.h5", config_, samples_).status());
  locks_refused = false;
  EXPECT_EQ(locks_asked, before);
}

TEST_F(ShardReaderTest, ThreadsReadAtOnce) {
  ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path_));
  std::vector<std::thread> threads;
  std::vector<int> good(4);
  for (size_t t = 0; t < good.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50; ++round) {
        const auto damaged = reader->Verify();
        const auto statistics = reader->ReadStatistics();
        good[t] += damaged.ok() && damaged->empty() && statistics.ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(good, ::testing::Each(50));
}

// A sound file of HDF5 and footer whose attributes say this format and version.
absl::Status WriteOtherFormat(const std::filesystem::path& path, std::string_view format,
                              int64_t version) {
  MemoryStorage storage;
  STATETAP_ASSIGN_OR_RETURN(Hdf5File hdf5, Hdf5File::Create(&storage));
  STATETAP_RETURN_IF_ERROR(hdf5.SetAttribute("format", format));
  STATETAP_RETURN_IF_ERROR(hdf5.SetAttribute("version", version));
  STATETAP_RETURN_IF_ERROR(hdf5.Close());
  STATETAP_ASSIGN_OR_RETURN(const File file, File::Create(path));
  STATETAP_RETURN_IF_ERROR(storage.CopyTo(file));
  ShardFooter footer{.hdf5_bytes = storage.Size()};
  footer.datasets.push_back(
      {.path = "/states/1", .shape = {.type = Hdf5Type::kBf16, .width = 8, .rows_per_chunk = 1}});
  STATETAP_ASSIGN_OR_RETURN(footer.structure_digest, StructureDigest(file, footer));
  const std::string bytes = EncodeFooter(footer);
  return file.WriteAt(footer.hdf5_bytes, std::as_bytes(std::span(bytes)));
}

// A file of commit 44da3d3, which knew neither classes of tokens nor their ids.
TEST_F(ShardReaderTest, AShardWithoutStatisticsByClassReads) {
  ASSERT_OK_AND_ASSIGN(
      const auto reader,
      ShardReader::Open(STATETAP_SOURCE_DIR "/tests/data/shard/without-classes.h5"));
  EXPECT_EQ(reader->config().first_special, -1);
  EXPECT_EQ(reader->config().think_token, -1);
  ASSERT_OK_AND_ASSIGN(const auto statistics, reader->ReadStatistics());
  for (const BoundaryStatistics& boundary : statistics) {
    EXPECT_EQ(boundary.count, 381);
    EXPECT_EQ(boundary.AllClasses().count, 0);
    EXPECT_TRUE(std::isnan(boundary.AllClasses().MeanCosine()));
  }
  ASSERT_OK_AND_ASSIGN(const auto damaged, reader->Verify());
  EXPECT_TRUE(damaged.empty());
  EXPECT_OK(CheckStatistics(*reader));
}

TEST_F(ShardReaderTest, StatisticsAreThoseOfTheStates) {
  for (const StatesDtype dtype : {StatesDtype::kBf16, StatesDtype::kFp8}) {
    ShardConfig config = MakeShardConfig(128, {0, 2, 8});
    config.dtype = dtype;
    std::vector<TestSample> samples;
    for (const int tokens : {1, 5, 300})
      samples.push_back(MakeSample(config, tokens, static_cast<uint32_t>(tokens)));
    samples[2].states[1][64] = 0x7f80;  // infinity
    std::fill_n(samples[2].states[2].begin(), 128, uint16_t{0});
    const auto path = folder_ / fmt::format("{}.h5", NameOf(dtype));
    ASSERT_OK(testing::WriteShard(path, config, samples));
    ASSERT_OK_AND_ASSIGN(const auto reader, ShardReader::Open(path));
    EXPECT_OK(CheckStatistics(*reader)) << NameOf(dtype);
  }
}

// States of one shard beside the statistics of another: its checksums hold.
TEST_F(ShardReaderTest, StatisticsOfOtherStatesAreFound) {
  ShardConfig config = MakeShardConfig(128, {0, 2});
  TestSample sample = MakeSample(config, 40, 1);
  BoundaryStatistics sound(128), other(128);
  const auto classes = TokenClassesOf(sample.record.input_ids, sample.record.loss_mask, 150000);
  sound.Add(sample.states[0], classes);
  other.Add(sample.states[1], classes, sample.states[0]);
  const auto check = [&](const BoundaryStatistics& second,
                         const std::string& name) -> absl::Status {
    STATETAP_RETURN_IF_ERROR(testing::WriteShard(folder_ / name, config, std::span(&sample, 1),
                                                 {.statistics = ShardWriter::Statistics::kLeaveOut,
                                                  .kept_statistics = {sound, second}})
                                 .status());
    STATETAP_ASSIGN_OR_RETURN(const auto reader, ShardReader::Open(folder_ / name));
    return CheckStatistics(*reader);
  };
  EXPECT_OK(check(other, "sound.h5"));
  BoundaryStatistics wrong = other;
  wrong.max[7] *= 2;
  EXPECT_THAT(check(wrong, "max.h5"),
              StatusIs(absl::StatusCode::kDataLoss, "max of channel 7 of boundary 2"));
  wrong = other;
  wrong.mean[3] += 1e-5;
  EXPECT_THAT(check(wrong, "mean.h5"), StatusIs(absl::StatusCode::kDataLoss, "mean of channel 3"));
  wrong = other;
  ++wrong.zero_rows;
  EXPECT_THAT(check(wrong, "zero.h5"), StatusIs(absl::StatusCode::kDataLoss, "zero_rows"));
  wrong = other;
  wrong.by_class[3].cosine += 1e-3;
  EXPECT_THAT(check(wrong, "cosine.h5"),
              StatusIs(absl::StatusCode::kDataLoss, "cosine of class prompt"));
}

TEST_F(ShardReaderTest, OtherFormatsAndLaterVersionsAreRefusedAsSuch) {
  ASSERT_OK(WriteOtherFormat(path_, "statetap-shard", 2));
  EXPECT_THAT(ShardReader::Open(path_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "a.h5: shard version 2; this program reads version 1"));
  ASSERT_OK(WriteOtherFormat(path_, "someone-else", 1));
  EXPECT_THAT(ShardReader::Open(path_),
              StatusIs(absl::StatusCode::kDataLoss, "format is \"someone-else\""));
  ASSERT_OK(WriteOtherFormat(path_, "statetap-shard", 1));
  EXPECT_THAT(ShardReader::Open(path_), StatusIs(absl::StatusCode::kDataLoss, "complete"));
}

}  // namespace
}  // namespace statetap
