#include "client/lib/input_files.h"

#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include <fstream>
#include <thread>

#include "client/lib/line_reader.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::StatusIs;
using testing::TempDir;

std::string Gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string Zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // as the zstd program does
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

std::string Write(const TempDir& dir, const std::string& name, const std::string& content) {
  std::ofstream(dir / name, std::ios::binary) << content;
  return (dir / name).string();
}

std::vector<std::string> LinesOf(const std::string& path, LineReader::Options options = {}) {
  std::vector<std::string> lines;
  auto reader = LineReader::Open(path, options);
  EXPECT_OK(reader);
  while (reader.ok()) {
    const auto line = (*reader)->Next();
    EXPECT_OK(line);
    if (!line.ok() || !line->has_value()) break;
    lines.emplace_back(**line);
  }
  return lines;
}

absl::Status ReadAll(const std::string& path, LineReader::Options options = {}) {
  STATETAP_ASSIGN_OR_RETURN(const auto reader, LineReader::Open(path, options));
  while (true) {
    STATETAP_ASSIGN_OR_RETURN(const auto line, reader->Next());
    if (!line.has_value()) return absl::OkStatus();
  }
}

TEST(LineReaderTest, PlainGzipAndZstdGiveTheSameLines) {
  TempDir dir;
  std::string text;
  std::vector<std::string> expected;
  for (int i = 0; i < 20000; ++i) {
    expected.push_back(std::to_string(i) + std::string(static_cast<size_t>(i % 300), 'x'));
    text += expected.back() + "\n";
  }
  // Several members, as pigz and cat make them.
  const size_t half = text.size() / 2;
  const std::string front = text.substr(0, half), back = text.substr(half);
  EXPECT_EQ(LinesOf(Write(dir, "a.jsonl", text)), expected);
  EXPECT_EQ(LinesOf(Write(dir, "b.gz", Gzip(front) + Gzip(back))), expected);
  EXPECT_EQ(LinesOf(Write(dir, "c.zst", Zstd(front) + Zstd(back))), expected);
  EXPECT_EQ(LinesOf(Write(dir, "d.jsonl", Zstd(text))), expected) << "the name does not matter";
}

TEST(LineReaderTest, EndsAndMarks) {
  TempDir dir;
  EXPECT_EQ(LinesOf(Write(dir, "a", "")), std::vector<std::string>());
  EXPECT_EQ(LinesOf(Write(dir, "b", "x")), std::vector<std::string>({"x"}));
  EXPECT_EQ(LinesOf(Write(dir, "c", "x\n\ny\r\n")), (std::vector<std::string>{"x", "", "y\r"}));
  EXPECT_EQ(LinesOf(Write(dir, "d", "\xef\xbb\xbfx\n\xef\xbb\xbfy")),
            (std::vector<std::string>{"x", "\xef\xbb\xbfy"}));
}

TEST(LineReaderTest, CutAndDamagedFilesAreErrors) {
  TempDir dir;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += std::to_string(i * 7919) + "\n";
  for (const std::string& whole : {Gzip(text), Zstd(text)}) {
    EXPECT_THAT(ReadAll(Write(dir, "cut", whole.substr(0, whole.size() - 1))),
                StatusIs(absl::StatusCode::kDataLoss, "cut: ends in the middle"));
    std::string damaged = whole;
    damaged[whole.size() / 2] = static_cast<char>(damaged[whole.size() / 2] ^ 0x55);
    EXPECT_THAT(ReadAll(Write(dir, "damaged", damaged)),
                StatusIs(absl::StatusCode::kDataLoss, "damaged"));
  }
}

TEST(LineReaderTest, MemoryIsBoundedByTheLongestLine) {
  TempDir dir;
  // 64 MiB of one character in 60 kB.
  const std::string path = Write(dir, "bomb", Gzip(std::string(size_t{64} << 20, 'x')));
  EXPECT_THAT(ReadAll(path, {.max_line_bytes = 1 << 20}),
              StatusIs(absl::StatusCode::kResourceExhausted, "line 1"));
}

TEST(LineReaderTest, WhatIsNoTextFileSaysSo) {
  TempDir dir;
  EXPECT_THAT(LineReader::Open(dir.path().string(), {}),
              StatusIs(absl::StatusCode::kInvalidArgument, "is a folder"));
  EXPECT_THAT(LineReader::Open((dir / "none").string(), {}),
              StatusIs(absl::StatusCode::kNotFound, "none"));
  EXPECT_THAT(LineReader::Open(Write(dir, "p", "PAR1xxxx"), {}),
              StatusIs(absl::StatusCode::kInvalidArgument, "Parquet"));
}

TEST(InputFilesTest, ValidateCountsAndPlacesFaults) {
  TempDir dir;
  std::string bad;
  for (int i = 0; i < 30; ++i) bad += "{\"prompt\":\"x\"}\n\nnope\n";
  const std::string a = Write(dir, "a.jsonl", "{\"input_ids\":[1,2,3]}\n");
  const std::string b = Write(dir, "b.jsonl", bad);
  ASSERT_OK_AND_ASSIGN(const auto files, InputFiles::Open({a, b}));
  ASSERT_OK_AND_ASSIGN(const InputSummary summary, files->Validate(nullptr));
  EXPECT_EQ(summary.samples, 31);
  EXPECT_EQ(summary.faulty_lines, 30);
  ASSERT_EQ(summary.faults.size(), InputSummary::kMaxFaults);
  EXPECT_EQ(summary.faults[1].place.file, b);
  EXPECT_EQ(summary.faults[1].place.line, 6);
  EXPECT_EQ(summary.token_ids, 3);
  EXPECT_EQ(summary.samples_by_source.at("b.jsonl"), 30);
  EXPECT_EQ(summary.kinds.at(LineKind::kPrompt).samples, 30);
  EXPECT_EQ(summary.kinds.at(LineKind::kPrompt).first.line, 1);
  EXPECT_EQ(summary.kinds.at(LineKind::kTokens).first.file, a);
  EXPECT_EQ(files->DefaultName(), "a.jsonl+b.jsonl");
}

// As `statetap submit <(program)` gives them: nothing can be read twice from these.
TEST(InputFilesTest, APipeIsReadAsOftenAsAFile) {
  const TempDir dir;
  const std::string path = dir / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  std::thread writer([&] {
    std::ofstream out(path);
    for (int i = 0; i < 20000; ++i) out << "{\"prompt\": \"number " << i << "\"}\n";
  });
  const auto files = InputFiles::Open({path});
  writer.join();
  ASSERT_OK(files);
  for (int pass = 0; pass < 2; ++pass) {
    ASSERT_OK_AND_ASSIGN(const InputSummary summary, (*files)->Validate(nullptr));
    EXPECT_EQ(summary.samples, 20000);
    EXPECT_EQ(summary.faulty_lines, 0);
    EXPECT_EQ(summary.samples_by_source.at("pipe"), 20000);
  }
  EXPECT_EQ((*files)->DefaultName(), "");
}

TEST(InputFilesTest, LineOf100MBIsASampleForTheServerToJudge) {
  TempDir dir;
  const std::string path =
      Write(dir, "long", "{\"prompt\":\"" + std::string(100'000'000, 'x') + "\"}\n");
  ASSERT_OK_AND_ASSIGN(const auto files, InputFiles::Open({path}));
  ASSERT_OK_AND_ASSIGN(const InputSummary summary, files->Validate(nullptr));
  EXPECT_EQ(summary.samples, 1);
  EXPECT_EQ(summary.text_bytes, 100'000'000);
  EXPECT_TRUE(summary.faults.empty());
}

TEST(InputFilesTest, IdWithOtherContentIsAFaultAndUnreadFieldsAreCounted) {
  TempDir dir;
  const std::string path = Write(dir, "ids",
                                 "{\"id\":\"a\",\"prompt\":\"x\",\"lang\":1}\n"
                                 "{\"id\":\"a\",\"prompt\":\"x\",\"lang\":2,\"source\":\"s\"}\n"
                                 "{\"id\":\"a\",\"prompt\":\"y\"}\n");
  ASSERT_OK_AND_ASSIGN(const auto files, InputFiles::Open({path}));
  ASSERT_OK_AND_ASSIGN(const InputSummary summary, files->Validate(nullptr));
  EXPECT_EQ(summary.samples, 2);
  ASSERT_EQ(summary.faults.size(), 1u);
  EXPECT_EQ(summary.faults[0].place.line, 3);
  EXPECT_NE(summary.faults[0].message.find("line 1"), std::string::npos);
  EXPECT_EQ(summary.ignored_fields, (std::map<std::string, int64_t>{{"lang", 2}}));
}

}  // namespace
}  // namespace statetap
