// Writes the shard that tests/python/shard_h5py_test.py reads: shard_example PATH [fp8]. Every
// value follows from a formula that the test repeats.
#include <cstdio>

#include "extractor/shard/shard_writer.h"
#include "tests/shard/sample_maker.h"

namespace statetap {
namespace {

constexpr int kTokens[] = {3, 1, 300, 77};

absl::Status Write(const char* path, StatesDtype dtype) {
  ShardConfig config = testing::MakeShardConfig(128, {0, 2, 8});
  config.first_special = 2000;
  config.dtype = dtype;
  STATETAP_ASSIGN_OR_RETURN(const auto writer,
                            ShardWriter::Create(path, config, {.rows_per_chunk = 32}));
  int row = 0;
  for (int sample = 0; sample < 4; ++sample) {
    testing::TestSample made = testing::MakeSample(config, kTokens[sample], 1);
    SampleRecord& record = made.record;
    record.id = fmt::format("样本-{}", sample);
    record.split = sample % 2 == 0 ? "train" : "eval";
    record.source_index = 10 * sample;
    record.truncated = sample == 2;
    if (sample == 1) {
      record.logprobs.clear();
      record.entropies.clear();
      record.meta_json.clear();
    }
    for (int token = 0; token < kTokens[sample]; ++token, ++row) {
      const auto at = static_cast<size_t>(token);
      record.input_ids[at] = 7 * row;
      if (sample != 1) {
        record.logprobs[at] = -0.25f * static_cast<float>(row);
        record.entropies[at] = 0.5f * static_cast<float>(row);
      }
      for (int b = 0; b < 3; ++b) {
        for (int c = 0; c < 128; ++c) {
          made.states[static_cast<size_t>(b)][static_cast<size_t>(token * 128 + c)] =
              static_cast<uint16_t>(0x3c00 + (row * 31 + c * 7 + b * 111) % 0x400);
        }
      }
    }
    STATETAP_RETURN_IF_ERROR(writer->Append(record, made.spans()));
  }
  return writer->Commit().status();
}

}  // namespace
}  // namespace statetap

int main(int argc, char** argv) {
  if (argc < 2) return std::fputs("usage: shard_example PATH [fp8]\n", stderr), 2;
  const absl::Status status = statetap::Write(
      argv[1], argc > 2 ? statetap::StatesDtype::kFp8 : statetap::StatesDtype::kBf16);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
