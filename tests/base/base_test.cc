#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "extractor/base/digest.h"
#include "extractor/base/dtype.h"
#include "extractor/base/file.h"
#include "extractor/base/json.h"
#include "extractor/base/mapped_file.h"
#include "extractor/base/recycled_memory.h"
#include "extractor/base/text.h"
#include "extractor/base/worker_pool.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

using testing::StatusIs;

TEST(Bf16Test, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<uint16_t>(bits);
    const float wide = Bf16ToFloat(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(wide))));
      EXPECT_FALSE(Bf16IsFinite(value));
    } else {
      EXPECT_EQ(FloatToBf16(wide), value);
      EXPECT_EQ(Bf16IsFinite(value), std::isfinite(wide));
    }
  }
}

TEST(Bf16Test, TheFirstThatIsNotFiniteIsFoundAnywhere) {
  for (const size_t size : {0u, 1u, 1023u, 1024u, 1025u, 5000u}) {
    std::vector<uint16_t> values(size, 0xff7f);  // the most negative finite one
    EXPECT_EQ(FirstNonFinite(values), size);
    for (size_t at = 0; at < size; at += 1 + at / 7) {
      std::vector<uint16_t> bad = values;
      bad[at] = 0x7f80;
      bad.back() = 0xffff;
      EXPECT_EQ(FirstNonFinite(bad), at) << size;
    }
  }
}

TEST(Bf16Test, RoundsToNearestTiesToEven) {
  EXPECT_EQ(FloatToBf16(1.0f + 0x1p-8f), FloatToBf16(1.0f));                // a tie, down to even
  EXPECT_EQ(FloatToBf16(1.0f + 3 * 0x1p-8f), FloatToBf16(1.0f + 0x1p-6f));  // a tie, up to even
  EXPECT_EQ(FloatToBf16(1.0f + 0x1.02p-8f), FloatToBf16(1.0f + 0x1p-7f));
  EXPECT_EQ(Bf16ToFloat(FloatToBf16(std::numeric_limits<float>::max())),
            std::numeric_limits<float>::infinity());
}

TEST(RecycledMemoryTest, WhatIsGivenBackIsTakenAgainAndHoldsWhatWasAskedFor) {
  const size_t kept = KeptMemory();
  for (const size_t bytes : {size_t{1}, size_t{65535}, size_t{65536}, size_t{65537},
                             size_t{230'001}, size_t{3} << 20, (size_t{29} << 20) + 5}) {
    auto* first = static_cast<unsigned char*>(TakeMemory(bytes));
    std::memset(first, 7, bytes);
    GiveBackMemory(first, bytes);
    if (bytes < 65536) {
      EXPECT_EQ(KeptMemory(), kept) << bytes;
      continue;
    }
    EXPECT_GE(KeptMemory() - kept, bytes);
    EXPECT_LE(KeptMemory() - kept, bytes + bytes / 4 + 1) << bytes;
    auto* again = static_cast<unsigned char*>(TakeMemory(bytes));
    EXPECT_EQ(again, first);
    auto* other = static_cast<unsigned char*>(TakeMemory(bytes));
    EXPECT_NE(other, again);
    std::memset(other, 8, bytes);
    EXPECT_EQ(again[bytes - 1], 7);
    GiveBackMemory(other, bytes);
    EXPECT_EQ(TakeMemory(bytes), other);
    std::free(other);  // so that the next size finds nothing kept
    std::free(again);
    EXPECT_EQ(KeptMemory(), kept);
  }
}

TEST(RecycledMemoryTest, NoMoreIsKeptThanIsSaid) {
  constexpr size_t kBytes = size_t{256} << 20;  // never touched
  const size_t kept = KeptMemory();
  std::vector<void*> blocks;
  for (size_t i = 0; i < kMostKept / kBytes + 3; ++i) blocks.push_back(TakeMemory(kBytes));
  for (void* block : blocks) GiveBackMemory(block, kBytes);
  EXPECT_LE(KeptMemory(), kMostKept);
  EXPECT_GT(KeptMemory(), kMostKept - kBytes);
  while (KeptMemory() > kept) std::free(TakeMemory(kBytes));
}

TEST(RecycledMemoryTest, ManyThreadsTakeAndGiveBack) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (size_t i = 0; i < 300; ++i) {
        RecycledVector<uint16_t> values(40'000 + i % 7 * 9'000, static_cast<uint16_t>(t));
        EXPECT_EQ(std::count(values.begin(), values.end(), t),
                  static_cast<ptrdiff_t>(values.size()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(HalfTest, SubnormalsAndSpecials) {
  EXPECT_EQ(HalfToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(HalfToFloat(0x83ff), -1023 * 0x1p-24f);
  EXPECT_EQ(HalfToFloat(0x3c00), 1.0f);
  EXPECT_EQ(HalfToFloat(0x7bff), 65504.0f);
  EXPECT_TRUE(std::isinf(HalfToFloat(0xfc00)));
  EXPECT_TRUE(std::isnan(HalfToFloat(0x7e00)));
}

TEST(JsonTest, KeepsKeyOrderAndNumberForms) {
  auto json = ParseJson(R"({"z": 10, "a": 10.0, "m": 1e22, "k": 18446744073709551615})");
  ASSERT_OK(json);
  EXPECT_EQ(DumpJson(*json), R"({"z":10,"a":10.0,"m":1e+22,"k":18446744073709551615})");
}

TEST(JsonTest, IntegersBeyond64BitsKeepTheirDigits) {
  const std::string text =
      R"({"a":[1,-170141183460469231731687303715884105728],"b":18446744073709551616,)"
      R"("c\"":{"d":123456789012345678901234567890},"e":1e30})";
  ASSERT_OK_AND_ASSIGN(const Json json, ParseJson(text));
  EXPECT_EQ(BigInteger(json["b"]), "18446744073709551616");
  EXPECT_EQ(BigInteger(json["a"][0]), std::nullopt);
  EXPECT_EQ(BigInteger(json["e"]), std::nullopt);
  const std::string dumped = DumpJson(json);
  EXPECT_EQ(dumped.substr(0, dumped.find("\"e\"")), text.substr(0, text.find("\"e\"")));
  ASSERT_OK_AND_ASSIGN(const Json again, ParseJson(dumped));
  EXPECT_EQ(again, json);
}

TEST(JsonTest, RefusesWhatReadersDisagreeOn) {
  EXPECT_THAT(ParseJson(R"({"a": 1, "b": {"a": 1}, "a": 2})"),
              StatusIs(absl::StatusCode::kInvalidArgument, "\"a\" is given twice"));
  EXPECT_THAT(ParseJson("{\"a\": \"\x80\"}"), StatusIs(absl::StatusCode::kInvalidArgument, "byte"));
  EXPECT_THAT(ParseJson("{} x"), StatusIs(absl::StatusCode::kInvalidArgument, "byte 4"));
  EXPECT_THAT(ParseJson(R"("\ud800")"), StatusIs(absl::StatusCode::kInvalidArgument, "byte"));
  EXPECT_THAT(ParseJson("[1e400]"), StatusIs(absl::StatusCode::kInvalidArgument, "too large"));
  EXPECT_THAT(ParseJson(std::string(100000, '[')),
              StatusIs(absl::StatusCode::kInvalidArgument, ""));
}

TEST(JsonTest, ManyKeysAreRefusedAtOnce) {
  const auto with_keys = [](int count) {
    std::string json = "{";
    for (int i = 0; i < count; ++i) json += fmt::format("\"{}\":0,", i);
    json.back() = '}';
    return ParseJson(json);
  };
  EXPECT_OK(with_keys(4096));
  EXPECT_THAT(with_keys(1'000'000),
              StatusIs(absl::StatusCode::kInvalidArgument, "more than 4096 keys"));
}

TEST(TextTest, CutKeepsBeginningEndAndWholeCharacters) {
  EXPECT_EQ(CutMiddle("short", 5), "short");
  std::string text = "field: ";
  for (int i = 0; i < 1000; ++i) text += "ü";
  text += "; the remedy";
  for (size_t most = 60; most < 70; ++most) {
    const std::string cut = CutMiddle(text, most);
    EXPECT_LE(cut.size(), most + 40);
    EXPECT_TRUE(cut.starts_with("field: ü"));
    EXPECT_TRUE(cut.ends_with("ü; the remedy"));
    EXPECT_OK(ParseJson(fmt::format("\"{}\"", cut)));  // UTF-8
  }
  EXPECT_EQ(CountCharacters("aü€𝄞"), 4u);
}

TEST(FileTest, AtomicWriteReplacesAndLeavesNoTemporary) {
  testing::TempDir dir;
  ASSERT_OK(WriteFileAtomically(dir / "a", "one"));
  ASSERT_OK(WriteFileAtomically(dir / "a", "two"));
  EXPECT_EQ(*ReadWholeFile(dir / "a"), "two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

// Two writers of one file: each writes a temporary of its own, and one of them wins whole.
TEST(FileTest, WritersOfOneFileDoNotMeet) {
  testing::TempDir dir;
  const std::string a(100'000, 'a'), b(70'000, 'b');
  std::thread other([&] {
    for (int i = 0; i < 50; ++i) EXPECT_OK(WriteFileAtomically(dir / "f", b));
  });
  for (int i = 0; i < 50; ++i) {
    EXPECT_OK(WriteFileAtomically(dir / "f", a));
    const std::string now = *ReadWholeFile(dir / "f");
    EXPECT_TRUE(now == a || now == b) << now.size();
  }
  other.join();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(FileTest, FolderIsHeldByOne) {
  testing::TempDir dir;
  {
    ASSERT_OK_AND_ASSIGN(const File held, LockFolder(dir.path()));
    EXPECT_THAT(LockFolder(dir.path()),
                StatusIs(absl::StatusCode::kFailedPrecondition, "in use by another"));
  }
  EXPECT_OK(LockFolder(dir.path()));
}

TEST(FileTest, ErrorsNameThePath) {
  testing::TempDir dir;
  EXPECT_THAT(ReadWholeFile(dir / "missing"), StatusIs(absl::StatusCode::kNotFound, "missing"));
  ASSERT_OK(WriteFileAtomically(dir / "short", "abc"));
  ASSERT_OK_AND_ASSIGN(const File file, File::OpenForRead(dir / "short"));
  std::byte buffer[8];
  EXPECT_THAT(file.ReadAt(0, buffer), StatusIs(absl::StatusCode::kOutOfRange, "ends at byte 3"));
  EXPECT_THAT(ReadWholeFile(dir / "short", 2),
              StatusIs(absl::StatusCode::kResourceExhausted, "at most 2"));
}

TEST(DigestTest, KnownValues) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string text(100000, 'x');
  Xxh3 pieces;
  pieces.Update(std::as_bytes(std::span(text).first(777)));
  pieces.Update(std::as_bytes(std::span(text).subspan(777)));
  EXPECT_EQ(pieces.Digest(), Xxh3Of(std::as_bytes(std::span(text))));
  EXPECT_EQ(HexOf(0xab), "00000000000000ab");
}

TEST(WorkerPoolTest, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    WorkerPool pool(threads);
    for (const int64_t count : {0, 1, 2, 3, 4, 5, 100}) {
      std::vector<int> hits(static_cast<size_t>(count));
      pool.ParallelFor(count, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), int64_t{0}), count);
    }
  }
}

TEST(FileTest, PagesAreReadAroundTheCacheOrThroughIt) {
  std::string content;
  for (int i = 0; i < 3 * 4096 + 77; ++i) content += static_cast<char>(i * 31 + i / 256);
  // tmpfs refused O_DIRECT for long.
  for (const std::filesystem::path parent : {"", "/dev/shm"}) {
    if (!parent.empty() && !std::filesystem::exists(parent)) continue;
    const testing::TempDir dir;
    const auto path = (parent.empty() ? dir.path() : parent) /
                      fmt::format("statetap-pages-{}", reinterpret_cast<uintptr_t>(&content));
    ASSERT_OK(WriteFileAtomically(path, content));
    ASSERT_OK_AND_ASSIGN(const File file, File::OpenForPages(path));
    std::filesystem::remove(path);
    auto* pages = static_cast<std::byte*>(std::aligned_alloc(File::kPage, 5 * File::kPage));
    const auto size = static_cast<int64_t>(content.size());
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {1, 4097}, {4096, 8192}, {4095, size}, {size - 1, size}, {9000, 9000}}) {
      ASSERT_OK(file.ReadPages(begin, end, pages));
      const std::string_view got(reinterpret_cast<char*>(pages + begin % File::kPage),
                                 static_cast<size_t>(end - begin));
      EXPECT_EQ(got, content.substr(static_cast<size_t>(begin), got.size()));
    }
    EXPECT_EQ(file.ReadPages(8192, size + 1, pages).code(), absl::StatusCode::kOutOfRange);
    EXPECT_EQ(file.ReadPages(4 * 4096, 4 * 4096 + 1, pages).code(), absl::StatusCode::kOutOfRange);
    std::free(pages);
  }
}

TEST(MappedFileTest, WhatIsCutUnderItReadsAsZerosAndIsToldOf) {
  const testing::TempDir dir;
  ASSERT_OK(WriteFileAtomically(dir / "file", std::string(3 * 4096, 'x')));
  ASSERT_OK_AND_ASSIGN(const File file, File::OpenForRead(dir / "file"));
  ASSERT_OK_AND_ASSIGN(const auto mapped, MappedFile::Map(file));
  ASSERT_EQ(mapped->bytes().size(), 3u * 4096);
  EXPECT_EQ(mapped->bytes()[2 * 4096], std::byte{'x'});
  EXPECT_FALSE(mapped->damaged());
  std::filesystem::resize_file(dir / "file", 4096);
  EXPECT_EQ(mapped->bytes()[2 * 4096 + 17], std::byte{0});
  EXPECT_EQ(mapped->bytes()[17], std::byte{'x'});
  EXPECT_TRUE(mapped->damaged());
  ASSERT_OK_AND_ASSIGN(const auto again, MappedFile::Map(file));
  EXPECT_EQ(again->bytes().size(), 4096u);
  EXPECT_FALSE(again->damaged());
}

}  // namespace
}  // namespace statetap
