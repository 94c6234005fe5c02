// Kernels that the ops choose among, each against plain arithmetic on the host, outputs poisoned:
// sizes that no model has, and the promise that a row's bits do not depend on its company.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "extractor/backend/cuda/decode.h"
#include "extractor/backend/cuda/launch.h"
#include "extractor/backend/cuda/owners.h"
#include "extractor/backend/cuda/step_graphs.h"
#include "extractor/backend/cuda/stream_product.h"
#include "extractor/backend/cuda/weights.h"
#include "tests/support/gpu.h"
#include "tests/support/status_matchers.h"

namespace statetap::cuda {
namespace {

using testing::DeviceArray;
using testing::FromBf16;
using testing::ToBf16;

std::mt19937 random_engine(std::random_device{}());  // NOLINT: fresh inputs each run

std::vector<float> Random(int64_t n, float scale = 1) {
  std::vector<float> values(static_cast<size_t>(n));
  std::normal_distribution<float> normal(0, scale);
  for (float& value : values) value = Bf16ToFloat(FloatToBf16(normal(random_engine)));
  return values;
}

const bf16* Rows(const DeviceArray<uint16_t>& array) {
  return reinterpret_cast<const bf16*>(array.data());
}

bool SameBits(const std::vector<float>& values, const float* others) {
  return std::memcmp(values.data(), others, values.size() * sizeof(float)) == 0;
}

struct ProductShape {
  int n, n2, k, batch;
};

class StreamProductTest : public ::testing::TestWithParam<ProductShape> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    stream_ = std::make_unique<Stream>();
    portable_ = std::make_unique<StreamWorkspace>(Family::kPortable);
    if (Attribute(cudaDevAttrComputeCapabilityMajor) == 9)
      hopper_ = std::make_unique<StreamWorkspace>(Family::kHopper);
    workspace_ = hopper_ ? hopper_.get() : portable_.get();
  }
  // y of m rows, from rows [first, first + m) of x; kAdd adds to 1.
  std::vector<float> Run(const DeviceArray<uint16_t>& x, const DeviceArray<uint16_t>& w,
                         const DeviceArray<uint16_t>& w2, int first, int m, Epilogue epilogue) {
    const auto [n, n2, k, batch] = GetParam();
    const int width = epilogue == Epilogue::kSwiGlu ? n : n + n2;
    const auto size = static_cast<size_t>(batch) * static_cast<size_t>(m * width);
    DeviceArray<float> floats(size);
    DeviceArray<uint16_t> halves(size);
    if (epilogue == Epilogue::kAdd) halves.Set(ToBf16(std::vector<float>(size, 1)));
    StreamProductParams p{};
    p.x = Rows(x) + int64_t{first} * batch * k;
    p.x_stride = int64_t{batch} * k;
    p.w = Rows(w);
    p.w2 = Rows(w2);
    p.w_stride = k;
    p.y = epilogue == Epilogue::kFloat ? static_cast<void*>(floats.data()) : halves.data();
    p.y_stride = int64_t{batch} * width;
    p.m = m;
    p.n = n;
    p.n2 = epilogue == Epilogue::kSwiGlu ? 0 : n2;
    p.k = k;
    p.epilogue = epilogue;
    p.batch = batch;
    p.x_batch = k;
    p.w_batch = int64_t{n} * k;
    p.y_batch = width;
    EXPECT_TRUE(Streamable(p));
    StreamProduct(p, *workspace_, stream_->get());
    testing::ExpectCuda(cudaStreamSynchronize(stream_->get()));
    return epilogue == Epilogue::kFloat ? floats.Get() : FromBf16(halves.Get());
  }
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StreamWorkspace> portable_, hopper_;
  const StreamWorkspace* workspace_ = nullptr;
};

TEST_P(StreamProductTest, EqualsPlainArithmeticAndNoRowDependsOnItsCompanyOrTheForm) {
  const auto [n, n2, k, batch] = GetParam();
  constexpr int kRows = 300;
  const float scale = 1 / std::sqrt(static_cast<float>(k));
  const auto x = Random(int64_t{kRows} * batch * k), w = Random(int64_t{batch} * n * k, scale),
             w2 = Random(int64_t{std::max(n, n2)} * k, scale);
  const DeviceArray<uint16_t> gpu_x(ToBf16(x)), gpu_w(ToBf16(w)), gpu_w2(ToBf16(w2));
  const auto dot = [&](int row, int b, const std::vector<float>& weights, int64_t weight_row) {
    double sum = 0;
    for (int i = 0; i < k; ++i)
      sum += double{x[static_cast<size_t>((int64_t{row} * batch + b) * k + i)]} *
             weights[static_cast<size_t>(weight_row * k + i)];
    return sum;
  };
  for (const Epilogue epilogue :
       {Epilogue::kBf16, Epilogue::kAdd, Epilogue::kFloat, Epilogue::kSwiGlu}) {
    const bool gated = epilogue == Epilogue::kSwiGlu;
    if (batch > 1 && gated) continue;
    const int width = gated ? n : n + n2;
    const auto together = Run(gpu_x, gpu_w, gpu_w2, 0, kRows, epilogue);
    for (int row = 0; row < kRows; row += 37) {
      for (int b = 0; b < batch; ++b) {
        for (int column = 0; column < width; column += std::max(1, width / 50)) {
          double expected =
              column < n ? dot(row, b, w, int64_t{b} * n + column) : dot(row, b, w2, column - n);
          if (gated) expected *= dot(row, b, w2, column) / (1 + std::exp(-expected));
          if (epilogue == Epilogue::kAdd) expected += 1;
          const float ours = together[(static_cast<size_t>(row) * static_cast<size_t>(batch) +
                                       static_cast<size_t>(b)) *
                                          static_cast<size_t>(width) +
                                      static_cast<size_t>(column)];
          const double tolerance = epilogue == Epilogue::kFloat ? 2e-5 : 5e-3;
          EXPECT_NEAR(ours, expected, tolerance * (1 + std::abs(expected)))
              << "row " << row << " column " << column;
        }
      }
    }
    // Every form: 1 to 8 rows, to 16, to 64, to 128, to 256, and tiles with their K in one, two,
    // four and eight parts.
    const std::vector<std::pair<int, int>> parts = {{0, 1},     {299, 1},  {5, 8},    {100, 9},
                                                    {280, 16},  {3, 17},   {236, 64}, {7, 65},
                                                    {170, 128}, {40, 129}, {0, 200}};
    for (const StreamWorkspace* workspace : {hopper_.get(), portable_.get()}) {
      if (workspace == nullptr) continue;
      workspace_ = workspace;
      for (const auto& [first, m] : parts) {
        const auto part = Run(gpu_x, gpu_w, gpu_w2, first, m, epilogue);
        EXPECT_TRUE(SameBits(part, together.data() + int64_t{first} * batch * width))
            << m << " rows from " << first
            << (workspace == hopper_.get() ? ", hopper" : ", portable");
      }
    }
  }
}

TEST_P(StreamProductTest, TwoInOneLaunchAreTheSameBits) {
  const auto [n, n2, k, batch] = GetParam();
  if (batch > 1 || n2 > 0) return;
  constexpr int kRows = 200;
  const float scale = 1 / std::sqrt(static_cast<float>(k));
  const DeviceArray<uint16_t> x(ToBf16(Random(int64_t{kRows} * k))),
      w(ToBf16(Random(int64_t{n} * k, scale))), w2(ToBf16(Random(int64_t{n} * k, scale)));
  for (const int m : {1, 8, 13, 16, 17, 64, 100, kRows}) {
    const auto size = static_cast<size_t>(m * n);
    DeviceArray<float> products(size);
    DeviceArray<uint16_t> gated(size);
    StreamProductParams p{};
    p.x = Rows(x);
    p.x_stride = p.w_stride = p.k = k;
    p.w = Rows(w2);
    p.y_stride = p.n = n;
    p.m = m;
    p.y = products.data();
    p.epilogue = Epilogue::kFloat;
    StreamProductParams q = p;
    q.w = Rows(w);
    q.w2 = Rows(w2);
    q.y = gated.data();
    q.epilogue = Epilogue::kSwiGlu;
    const auto product = Run(x, w2, w2, 0, m, Epilogue::kFloat),
               swiglu = Run(x, w, w2, 0, m, Epilogue::kSwiGlu);
    for (const StreamWorkspace* workspace : {hopper_.get(), portable_.get()}) {
      if (workspace == nullptr) continue;
      products.Set(std::vector<float>(size, NAN));
      gated.Set(std::vector<uint16_t>(size, 0xffff));
      StreamProductBoth(p, q, *workspace, stream_->get());
      testing::ExpectCuda(cudaStreamSynchronize(stream_->get()));
      EXPECT_TRUE(SameBits(products.Get(), product.data())) << m;
      EXPECT_TRUE(SameBits(FromBf16(gated.Get()), swiglu.data())) << m;
    }
  }
}

TEST_P(StreamProductTest, NoRowsAreNoLaunch) {
  const DeviceArray<uint16_t> nothing(64);
  EXPECT_TRUE(Run(nothing, nothing, nothing, 0, 0, Epilogue::kBf16).empty());
}

INSTANTIATE_TEST_SUITE_P(Every, StreamProductTest,
                         ::testing::Values(ProductShape{16, 0, 32, 1}, ProductShape{1, 0, 64, 1},
                                           ProductShape{7, 3, 96, 1}, ProductShape{130, 0, 224, 1},
                                           ProductShape{1536, 576, 7168, 1},  // query and latents
                                           ProductShape{384, 0, 7168, 1},     // router
                                           ProductShape{7168, 0, 256, 1},     // shared down
                                           ProductShape{20480, 0, 1024,
                                                        1},  // more tiles than one wave
                                           ProductShape{128, 0, 512, 8}));  // values of eight heads

// One token a sequence, against plain arithmetic in fp64.
TEST(AttendDecodeTest, EqualsPlainArithmeticAtEveryLength) {
  SKIP_WITHOUT_GPU();
  struct Shape {
    int heads, latent, lora;
    std::vector<int> positions;
  };
  const std::vector<int> lengths = {0, 1, 31, 32, 63, 64, 127, 128, 129, 700};
  for (const Shape& s :
       {Shape{8, 576, 512, lengths}, Shape{1, 80, 64, lengths}, Shape{20, 42, 40, lengths},
        Shape{16, 25, 23, lengths},
        // More pages than parts, and more tokens than one round.
        Shape{2, 40, 32, {8191, 8192, 8255, 12345}}, Shape{1, 16, 8, std::vector<int>(150, 70)}}) {
    const auto tokens = static_cast<int>(s.positions.size());
    const int longest = *std::max_element(s.positions.begin(), s.positions.end());
    const int pages = longest / kPageTokens + 1;
    // All read one cache, each through a page table of its own.
    const auto cache = Random(int64_t{pages} * kPageTokens * s.latent);
    const auto queries = Random(int64_t{tokens} * s.heads * s.latent);
    std::vector<int32_t> table, sequence;
    for (int t = 0; t < tokens; ++t) {
      sequence.push_back(t);
      for (int page = 0; page < pages; ++page) table.push_back((page + t) % pages);
    }
    constexpr float kScale = 0.2f;
    const DeviceArray<uint16_t> gpu_cache(ToBf16(cache)), gpu_queries(ToBf16(queries));
    const DeviceArray<int32_t> gpu_positions(s.positions), gpu_sequence(sequence), gpu_table(table);
    const auto parts = static_cast<size_t>(kSplitTokens * kMaxSplits * s.heads);
    DeviceArray<float> sums(parts * static_cast<size_t>(s.lora)), stats(2 * parts);
    DeviceArray<uint16_t> out(static_cast<size_t>(tokens * s.heads * s.lora));
    const Stream stream;
    AttendDecode(
        {Rows(gpu_queries), Rows(gpu_cache), gpu_positions.data(), gpu_sequence.data(),
         gpu_table.data(), pages, tokens, s.heads, s.latent, s.lora, kScale,
         reinterpret_cast<bf16*>(out.data()), sums.data(), reinterpret_cast<float2*>(stats.data())},
        stream.get());
    testing::ExpectCuda(cudaStreamSynchronize(stream.get()));
    const auto ours = FromBf16(out.Get());
    for (int t = 0; t<tokens; t += tokens> 20 ? 49 : 1) {
      const int position = s.positions[static_cast<size_t>(t)];
      for (int head = 0; head < s.heads; head += 7) {
        const int64_t row = int64_t{t} * s.heads + head;
        std::vector<double> out_row(static_cast<size_t>(s.lora)), weights;
        double largest = -INFINITY, sum = 0, error = 0, norm = 0;
        const auto key = [&](int j) {
          const int page = table[static_cast<size_t>(t * pages + j / kPageTokens)];
          return cache.data() + (int64_t{page} * kPageTokens + j % kPageTokens) * s.latent;
        };
        for (int j = 0; j <= position; ++j) {
          double score = 0;
          for (int c = 0; c < s.latent; ++c)
            score += double{queries[static_cast<size_t>(row * s.latent + c)]} * key(j)[c];
          weights.push_back(score * kScale);
          largest = std::max(largest, weights.back());
        }
        for (int j = 0; j <= position; ++j) {
          const double weight = std::exp(weights[static_cast<size_t>(j)] - largest);
          sum += weight;
          for (int c = 0; c < s.lora; ++c) out_row[static_cast<size_t>(c)] += weight * key(j)[c];
        }
        for (int c = 0; c < s.lora; ++c) {
          const double expected = out_row[static_cast<size_t>(c)] / sum,
                       difference = ours[static_cast<size_t>(row * s.lora + c)] - expected;
          error += difference * difference;
          norm += expected * expected;
        }
        // Weights and result are rounded to bf16.
        EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(norm)) << "position " << position;
      }
    }
  }
}

// Among many rows a block attends several splits of one, alone it has one: every bit is the same.
TEST(AttendDecodeTest, ARowDoesNotDependOnHowManyThereAre) {
  SKIP_WITHOUT_GPU();
  constexpr int kHeads = 8, kLatent = 576, kLora = 512, kTokens = 150, kPages = 200;
  std::vector<int32_t> positions, sequence, table;
  for (int t = 0; t < kTokens; ++t) {
    positions.push_back(t % 7 == 0 ? static_cast<int>(random_engine() % (kPages * kPageTokens))
                                   : static_cast<int>(random_engine() % 2200));
    sequence.push_back(t);
    for (int page = 0; page < kPages; ++page) table.push_back((page + t) % kPages);
  }
  const auto cache = ToBf16(Random(int64_t{kPages} * kPageTokens * kLatent));
  const auto queries = ToBf16(Random(int64_t{kTokens} * kHeads * kLatent));
  const DeviceArray<uint16_t> gpu_cache(cache);
  const DeviceArray<int32_t> gpu_table(table);
  constexpr size_t kParts = size_t{kSplitTokens} * kMaxSplits * kHeads;
  DeviceArray<float> sums(kParts * kLora), stats(2 * kParts);
  const auto attended = [&](int first, int count) {
    const auto row = size_t{kHeads} * kLatent;
    const auto from = [&](const auto& values, size_t width) {
      const auto begin = values.begin() + static_cast<int64_t>(static_cast<size_t>(first) * width);
      return std::vector(begin, begin + static_cast<int64_t>(static_cast<size_t>(count) * width));
    };
    const DeviceArray<uint16_t> gpu_queries(from(queries, row));
    const DeviceArray<int32_t> gpu_positions(from(positions, 1)), gpu_sequence(from(sequence, 1));
    DeviceArray<uint16_t> out(static_cast<size_t>(count) * kHeads * kLora);
    const Stream stream;
    AttendDecode(
        {Rows(gpu_queries), Rows(gpu_cache), gpu_positions.data(), gpu_sequence.data(),
         gpu_table.data(), kPages, count, kHeads, kLatent, kLora, 0.2f,
         reinterpret_cast<bf16*>(out.data()), sums.data(), reinterpret_cast<float2*>(stats.data())},
        stream.get());
    testing::ExpectCuda(cudaStreamSynchronize(stream.get()));
    return out.Get();
  };
  const auto together = attended(0, kTokens);
  for (const int count : {1, 5, 40}) {
    for (int first = 0; first + count <= kTokens; first += 37) {
      const auto some = attended(first, count);
      EXPECT_TRUE(
          std::equal(some.begin(), some.end(), together.begin() + int64_t{first} * kHeads * kLora))
          << count << " rows from " << first << " on";
    }
  }
}

StepPlan DecodePlan(int rows) {
  StepPlan plan;
  plan.num_seqs = rows;
  plan.pages_per_seq = 3;
  for (int t = 0; t < rows; ++t) {
    plan.ids.push_back(100 + t);
    plan.positions.push_back(10 + t);
    plan.sequence.push_back(rows - 1 - t);
    plan.decodes.push_back(1);
    plan.logit_rows.push_back(t);
    plan.draws.push_back({1, 1, 7, static_cast<uint64_t>(t), 11 + t, -1});
    for (int page = 0; page < 3; ++page) plan.page_table.push_back(t * 3 + page);
  }
  return plan;
}

// A word of a block holds nibbles of two rows, which may come at the same time.
TEST(DeviceExpertsTest, PiecesFromSeveralThreadsInAnyOrderMakeTheSameBlocks) {
  SKIP_WITHOUT_GPU();
  constexpr int kSlots = 3, kHidden = 192, kWidth = 128, kThreads = 4;
  ExpertsShape shape{kSlots, kHidden, kWidth, true, DType::kBf16, DType::kBf16, {0, 1, 2}};
  std::mt19937 random(5);
  struct Part {
    int number, rows;
    std::vector<uint32_t> words;
  };
  std::vector<Part> parts;
  for (int slot = 0; slot < kSlots; ++slot) {
    for (const Projection projection : {Projection::kGate, Projection::kUp, Projection::kDown}) {
      const bool down = projection == Projection::kDown;
      const int rows = down ? kHidden : kWidth, columns = down ? kWidth : kHidden;
      for (const bool scales : {false, true}) {
        Part part{ExpertPart(slot, projection, scales), rows, {}};
        part.words.resize(static_cast<size_t>(rows) * static_cast<size_t>(columns) /
                          (scales ? 64 : 8));
        for (uint32_t& word : part.words) word = static_cast<uint32_t>(random());
        parts.push_back(std::move(part));
      }
    }
  }
  const auto backend = std::move(MakeCudaBackends(1, {})[0]);
  const auto blocks_of = [&](int threads) {
    const auto weight = backend->NewExperts(shape);
    struct Piece {
      const Part* part;
      int first, rows;
    };
    std::vector<Piece> pieces;
    for (const Part& part : parts) {
      for (int first = 0, rows; first < part.rows; first += rows) {
        rows = std::min(threads == 1 ? part.rows : 1 + static_cast<int>(random() % 13),
                        part.rows - first);
        pieces.push_back({&part, first, rows});
      }
    }
    if (threads > 1) std::shuffle(pieces.begin(), pieces.end(), random);
    std::vector<std::thread> workers;
    for (int thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&, thread] {
        for (size_t i = static_cast<size_t>(thread); i < pieces.size();
             i += static_cast<size_t>(threads)) {
          const auto& [part, first, rows] = pieces[i];
          const size_t row = part->words.size() / static_cast<size_t>(part->rows);
          weight->Fill(part->number, first, rows,
                       reinterpret_cast<const std::byte*>(part->words.data() +
                                                          static_cast<size_t>(first) * row),
                       static_cast<int64_t>(row * sizeof(uint32_t)));
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    backend->FinishWeights();
    const DeviceExperts& experts = AsExperts(*weight);
    std::vector<unsigned char> bytes(static_cast<size_t>(kSlots * experts.slot_bytes()));
    testing::ExpectCuda(
        cudaMemcpy(bytes.data(), experts.memory(), bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  };
  const auto whole = blocks_of(1);
  for (int round = 0; round < 3; ++round) EXPECT_TRUE(blocks_of(kThreads) == whole);
}

TEST(StepGraphsTest, APlanIsRoundedUpByItsLastRow) {
  StepPlan rounded;
  RoundUp(DecodePlan(5), /*max_rows=*/100, rounded);
  EXPECT_EQ(rounded.ids, (std::vector<int32_t>{100, 101, 102, 103, 104, 104, 104, 104}));
  EXPECT_EQ(rounded.sequence, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(rounded.pages_per_seq, 8);
  for (int t = 0; t < 8; ++t) {
    const int from = 4 - std::min(t, 4);  // sequences ran backwards
    EXPECT_EQ(rounded.page_table[static_cast<size_t>(t * 8)], from * 3);
    EXPECT_EQ(rounded.page_table[static_cast<size_t>(t * 8 + 2)], from * 3 + 2);
    EXPECT_EQ(rounded.page_table[static_cast<size_t>(t * 8 + 3)], -1);
  }
  RoundUp(DecodePlan(5), /*max_rows=*/6, rounded);
  EXPECT_EQ(rounded.num_tokens(), 6);
  EXPECT_TRUE(OnlyDecodes(rounded));
}

TEST(StepGraphsTest, OtherStepsAreNoDecodeSteps) {
  StepPlan plan = DecodePlan(3);
  EXPECT_TRUE(OnlyDecodes(plan));
  plan.decodes[1] = 0;
  EXPECT_FALSE(OnlyDecodes(plan));
  plan = DecodePlan(3);
  plan.sequence[1] = 2;  // two rows of one sequence
  EXPECT_FALSE(OnlyDecodes(plan));
  plan = DecodePlan(3);
  plan.logit_rows = {0, 2};
  EXPECT_FALSE(OnlyDecodes(plan));
  EXPECT_FALSE(OnlyDecodes(StepPlan{}));
}

}  // namespace
}  // namespace statetap::cuda
