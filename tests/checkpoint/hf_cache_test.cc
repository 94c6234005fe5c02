#include "extractor/checkpoint/hf_cache.h"

#include <cstdlib>
#include <optional>

#include "extractor/base/file.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace statetap {
namespace {

namespace fs = std::filesystem;
using testing::StatusIs;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

// Sets or clears a variable until the end of the scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    Set(value);
  }
  ~ScopedVariable() { Set(old_); }

 private:
  void Set(const std::optional<std::string>& value) const {
    value ? setenv(name_, value->c_str(), 1) : unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> old_;
};

class HfCacheTest : public ::testing::Test {
 protected:
  HfCacheTest() { fs::create_directories(model_ / "refs"); }

  void AddSnapshot(const std::string& commit, int age_hours) {
    fs::create_directories(model_ / "snapshots" / commit);
    fs::last_write_time(model_ / "snapshots" / commit,
                        fs::file_time_type::clock::now() - std::chrono::hours(age_hours));
  }
  void AddRef(const std::string& name, const std::string& commit) {
    fs::create_directories((model_ / "refs" / name).parent_path());
    ASSERT_OK(WriteFileAtomically(model_ / "refs" / name, commit + "\n"));
  }

  testing::TempDir folder_;
  const fs::path hub_ = folder_ / "hub";
  const fs::path model_ = hub_ / "models--moonshotai--Kimi-K2.5";
  ScopedVariable cache_{"HF_HUB_CACHE", hub_.string()};
};

TEST_F(HfCacheTest, FindsTheRevisionAskedFor) {
  AddSnapshot("aaa", 3);
  AddSnapshot("bbb", 2);
  AddSnapshot("ccc", 1);
  AddRef("main", "aaa");
  AddRef("refs/pr/1", "bbb");
  const auto commit = [](std::string_view name) {
    auto path = ResolveModel(name);
    return path.ok() ? path->filename().string() : std::string(MessageOf(path.status()));
  };
  EXPECT_EQ(commit("moonshotai/Kimi-K2.5"), "aaa");
  EXPECT_EQ(commit("moonshotai/Kimi-K2.5@main"), "aaa");
  EXPECT_EQ(commit("moonshotai/Kimi-K2.5@refs/pr/1"), "bbb");
  EXPECT_EQ(commit("moonshotai/Kimi-K2.5@ccc"), "ccc");
  EXPECT_THAT(ResolveModel("moonshotai/Kimi-K2.5@ddd"), StatusIs(kNotFound, "revision ddd"));
}

TEST_F(HfCacheTest, TakesTheNewestSnapshotWithoutMain) {
  AddSnapshot("aaa", 3);
  AddSnapshot("bbb", 1);
  AddSnapshot("ccc", 2);
  ASSERT_OK_AND_ASSIGN(const fs::path snapshot, SnapshotOf(model_));
  EXPECT_EQ(snapshot.filename(), "bbb");
}

TEST_F(HfCacheTest, SaysWhatIsNotThere) {
  EXPECT_THAT(ResolveModel("moonshotai/Other"), StatusIs(kNotFound, "models--moonshotai--Other"));
  EXPECT_THAT(ResolveModel("moonshotai/Kimi-K2.5"), StatusIs(kNotFound, "not in the Hugging Face"));
  fs::create_directories(model_ / "snapshots");
  EXPECT_THAT(ResolveModel("moonshotai/Kimi-K2.5"), StatusIs(kNotFound, "holds no snapshot"));
  for (const char* name : {"", "kimi", "a/b/c", "/a", "../x", "a/..", "a/.hidden", "a b/c"}) {
    EXPECT_THAT(ResolveModel(name), StatusIs(kNotFound, "is no folder")) << name;
  }
  EXPECT_THAT(ResolveModel("moonshotai/Kimi-K2.5@../../x"),
              StatusIs(absl::StatusCode::kInvalidArgument, "no revision"));
}

TEST_F(HfCacheTest, LooksWhereTheVariablesSay) {
  AddSnapshot("aaa", 1);
  ScopedVariable no_cache("HF_HUB_CACHE", std::nullopt);
  {
    ScopedVariable home("HF_HOME", folder_.path().string());
    EXPECT_OK(ResolveModel("moonshotai/Kimi-K2.5"));
  }
  ScopedVariable no_home("HF_HOME", std::nullopt);
  fs::create_directories(folder_ / ".cache/huggingface");
  fs::rename(hub_, folder_ / ".cache/huggingface/hub");
  {
    ScopedVariable no_xdg("XDG_CACHE_HOME", std::nullopt);
    ScopedVariable user("HOME", folder_.path().string());
    EXPECT_OK(ResolveModel("moonshotai/Kimi-K2.5"));
  }
  ScopedVariable xdg("XDG_CACHE_HOME", (folder_ / ".cache").string());
  EXPECT_OK(ResolveModel("moonshotai/Kimi-K2.5"));
}

TEST_F(HfCacheTest, AFolderIsTakenAsItIs) {
  ASSERT_OK_AND_ASSIGN(const fs::path path, ResolveModel(hub_.string()));
  EXPECT_EQ(path, hub_);
}

TEST_F(HfCacheTest, NamesModels) {
  EXPECT_EQ(ModelName(model_ / "snapshots" / "aaa"), "moonshotai/Kimi-K2.5");
  EXPECT_EQ(ModelName(model_ / "snapshots" / "aaa" / ""), "moonshotai/Kimi-K2.5");
  EXPECT_EQ(ModelName("/models/tiny-kimi/"), "tiny-kimi");
  EXPECT_EQ(ModelName("/models/x/../tiny-kimi/."), "tiny-kimi");
  EXPECT_EQ(ModelName("/hub/models--gpt2/snapshots/x"), "gpt2");
}

}  // namespace
}  // namespace statetap
