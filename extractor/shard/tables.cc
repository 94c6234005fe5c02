#include "extractor/shard/tables.h"

#include <algorithm>
#include <ctime>
#include <iterator>
#include <limits>

#include "extractor/shard/format.h"

namespace statetap {
namespace {

constexpr std::string_view kRowOffset = "/samples/row_offset";

struct TextColumn {
  std::string_view path;
  std::string SampleEntry::*field;
};
constexpr TextColumn kTextColumns[] = {
    {"/samples/id", &SampleEntry::id},
    {"/samples/source", &SampleEntry::source},
    {"/samples/meta", &SampleEntry::meta_json},
    {"/samples/split", &SampleEntry::split},
    {"/samples/digest", &SampleEntry::digest},
    {"/samples/finish_reason", &SampleEntry::finish_reason},
};

template <typename T, typename Get>
absl::Status WriteColumn(Hdf5File* file, std::string_view path,
                         std::span<const SampleEntry> samples, Get get) {
  std::vector<T> values;
  values.reserve(samples.size());
  for (const SampleEntry& sample : samples) values.push_back(static_cast<T>(get(sample)));
  return file->WriteArray<T>(path, values);
}

template <typename T, typename Set>
absl::Status ReadColumn(const Hdf5File& file, std::string_view path,
                        std::vector<SampleEntry>* samples, Set set) {
  std::vector<T> values(samples->size());
  STATETAP_RETURN_IF_ERROR(file.ReadArray<T>(path, values));
  for (size_t i = 0; i < values.size(); ++i) set((*samples)[i], values[i]);
  return absl::OkStatus();
}

constexpr std::string_view kDtypes[] = {"bfloat16", "float8_e4m3", "none"};  // as StatesDtype
constexpr std::string_view kThinking = "thinking", kInstant = "instant";

std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

absl::Status Wrong(std::string_view what) { return absl::DataLossError(std::string(what)); }

}  // namespace

absl::Status WriteSampleTable(Hdf5File* file, std::span<const SampleEntry> samples) {
  std::vector<int64_t> row_offset{0};
  for (const SampleEntry& sample : samples) row_offset.push_back(row_offset.back() + sample.rows);
  STATETAP_RETURN_IF_ERROR(file->WriteArray<int64_t>(kRowOffset, row_offset));
  for (const TextColumn& column : kTextColumns) {
    std::vector<std::string> values;
    values.reserve(samples.size());
    for (const SampleEntry& sample : samples) values.push_back(sample.*column.field);
    STATETAP_RETURN_IF_ERROR(file->WriteStrings(column.path, values));
  }
  STATETAP_RETURN_IF_ERROR(
      WriteColumn<int32_t>(file, "/samples/prompt_tokens", samples,
                           [](const SampleEntry& sample) { return sample.prompt_tokens; }));
  STATETAP_RETURN_IF_ERROR(
      WriteColumn<uint8_t>(file, "/samples/truncated", samples,
                           [](const SampleEntry& sample) { return sample.truncated ? 1 : 0; }));
  STATETAP_RETURN_IF_ERROR(
      WriteColumn<int64_t>(file, "/samples/source_index", samples,
                           [](const SampleEntry& sample) { return sample.source_index; }));
  return WriteColumn<uint64_t>(file, "/samples/checksum", samples,
                               [](const SampleEntry& sample) { return sample.checksum; });
}

absl::StatusOr<std::vector<SampleEntry>> ReadSampleTable(const Hdf5File& file, int64_t rows,
                                                         int64_t max_text_bytes) {
  STATETAP_ASSIGN_OR_RETURN(const int64_t offsets, file.LengthOf(kRowOffset));
  // Every sample has a row and takes 8 bytes of the file here.
  if (offsets < 2 || offsets - 1 > rows || offsets > max_text_bytes / 8)
    return Wrong(fmt::format("{} has {} entries for {} rows", kRowOffset, offsets, rows));
  std::vector<int64_t> row_offset(static_cast<size_t>(offsets));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<int64_t>(kRowOffset, row_offset));
  std::vector<SampleEntry> samples(row_offset.size() - 1);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].first_row = row_offset[i];
    if (row_offset[i + 1] <= row_offset[i] || row_offset[i + 1] > rows)
      return Wrong(fmt::format("{} does not ascend at sample {}", kRowOffset, i));
    samples[i].rows = row_offset[i + 1] - row_offset[i];
  }
  if (row_offset.front() != 0 || row_offset.back() != rows)
    return Wrong(fmt::format("{} does not cover rows 0 to {}", kRowOffset, rows));

  for (const TextColumn& column : kTextColumns) {
    STATETAP_ASSIGN_OR_RETURN(
        std::vector<std::string> values,
        file.ReadStrings(column.path, static_cast<int64_t>(samples.size()), max_text_bytes));
    for (size_t i = 0; i < values.size(); ++i) samples[i].*column.field = std::move(values[i]);
  }
  STATETAP_RETURN_IF_ERROR(ReadColumn<int32_t>(
      file, "/samples/prompt_tokens", &samples,
      [](SampleEntry& sample, int32_t value) { sample.prompt_tokens = value; }));
  STATETAP_RETURN_IF_ERROR(ReadColumn<uint8_t>(
      file, "/samples/truncated", &samples,
      [](SampleEntry& sample, uint8_t value) { sample.truncated = value != 0; }));
  STATETAP_RETURN_IF_ERROR(
      ReadColumn<int64_t>(file, "/samples/source_index", &samples,
                          [](SampleEntry& sample, int64_t value) { sample.source_index = value; }));
  STATETAP_RETURN_IF_ERROR(
      ReadColumn<uint64_t>(file, "/samples/checksum", &samples,
                           [](SampleEntry& sample, uint64_t value) { sample.checksum = value; }));
  return samples;
}

namespace {

// by_class in columns, the classes in the order of TokenClass.
struct ClassColumns {
  std::vector<int64_t> count, histograms, compared;
  std::vector<double> cosine, squared_cosine;
};

absl::Status WriteClasses(Hdf5File* file, int boundary, const BoundaryStatistics& statistics) {
  ClassColumns columns;
  for (const ClassStatistics& of_class : statistics.by_class) {
    columns.count.push_back(of_class.count);
    columns.histograms.insert(columns.histograms.end(), of_class.row_rms_histogram.begin(),
                              of_class.row_rms_histogram.end());
    columns.compared.push_back(of_class.compared);
    columns.cosine.push_back(of_class.cosine);
    columns.squared_cosine.push_back(of_class.squared_cosine);
  }
  const auto path = [&](std::string_view name) { return StatsPath(boundary, name); };
  STATETAP_RETURN_IF_ERROR(file->WriteArray<int64_t>(path("class_count"), columns.count));
  STATETAP_RETURN_IF_ERROR(
      file->WriteArray<int64_t>(path("class_row_rms_histogram"), columns.histograms));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<int64_t>(path("class_compared"), columns.compared));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("class_cosine"), columns.cosine));
  return file->WriteArray<double>(path("class_squared_cosine"), columns.squared_cosine);
}

// Leaves zeros where the file has none of them: it is older.
absl::Status ReadClasses(const Hdf5File& file, int boundary, BoundaryStatistics* statistics) {
  const auto path = [&](std::string_view name) { return StatsPath(boundary, name); };
  if (!file.HasDataset(path("class_count"))) return absl::OkStatus();
  ClassColumns columns;
  for (auto* column : {&columns.count, &columns.compared}) column->resize(kTokenClasses);
  for (auto* column : {&columns.cosine, &columns.squared_cosine}) column->resize(kTokenClasses);
  columns.histograms.resize(size_t{kTokenClasses} * kRmsBins);
  STATETAP_RETURN_IF_ERROR(file.ReadArray<int64_t>(path("class_count"), columns.count));
  STATETAP_RETURN_IF_ERROR(
      file.ReadArray<int64_t>(path("class_row_rms_histogram"), columns.histograms));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<int64_t>(path("class_compared"), columns.compared));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("class_cosine"), columns.cosine));
  STATETAP_RETURN_IF_ERROR(
      file.ReadArray<double>(path("class_squared_cosine"), columns.squared_cosine));
  for (size_t c = 0; c < kTokenClasses; ++c) {
    ClassStatistics& to = statistics->by_class[c];
    to.count = columns.count[c];
    std::copy_n(columns.histograms.begin() + static_cast<ptrdiff_t>(c * kRmsBins), kRmsBins,
                to.row_rms_histogram.begin());
    to.compared = columns.compared[c];
    to.cosine = columns.cosine[c];
    to.squared_cosine = columns.squared_cosine[c];
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteStatistics(Hdf5File* file, int boundary, StatesDtype dtype,
                             const BoundaryStatistics& statistics) {
  STATETAP_RETURN_IF_ERROR(file->MakeGroup(fmt::format("/stats/{}", boundary)));
  const auto path = [&](std::string_view name) { return StatsPath(boundary, name); };
  STATETAP_RETURN_IF_ERROR(file->WriteScalar<int64_t>(path("count"), statistics.count));
  STATETAP_RETURN_IF_ERROR(file->WriteScalar<int64_t>(path("zero_rows"), statistics.zero_rows));
  STATETAP_RETURN_IF_ERROR(file->WriteScalar<int64_t>(path("nonfinite"), statistics.nonfinite));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("mean"), statistics.mean));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("m2"), statistics.m2));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("min"), statistics.min));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("max"), statistics.max));
  STATETAP_RETURN_IF_ERROR(file->WriteArray<double>(path("abs_max"), statistics.abs_max));
  if (dtype != StatesDtype::kBf16) {
    STATETAP_RETURN_IF_ERROR(
        file->WriteScalar<double>(path("squared_error"), statistics.squared_error));
  }
  STATETAP_RETURN_IF_ERROR(
      file->WriteArray<int64_t>(path("row_rms_histogram"), statistics.row_rms_histogram));
  return WriteClasses(file, boundary, statistics);
}

absl::StatusOr<BoundaryStatistics> ReadStatisticsOf(const Hdf5File& file, int boundary,
                                                    const ShardConfig& config) {
  const auto path = [&](std::string_view name) { return StatsPath(boundary, name); };
  BoundaryStatistics statistics(config.hidden);
  STATETAP_ASSIGN_OR_RETURN(statistics.count, file.ReadScalar<int64_t>(path("count")));
  STATETAP_ASSIGN_OR_RETURN(statistics.zero_rows, file.ReadScalar<int64_t>(path("zero_rows")));
  STATETAP_ASSIGN_OR_RETURN(statistics.nonfinite, file.ReadScalar<int64_t>(path("nonfinite")));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("mean"), statistics.mean));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("m2"), statistics.m2));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("min"), statistics.min));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("max"), statistics.max));
  STATETAP_RETURN_IF_ERROR(file.ReadArray<double>(path("abs_max"), statistics.abs_max));
  STATETAP_RETURN_IF_ERROR(
      file.ReadArray<int64_t>(path("row_rms_histogram"), statistics.row_rms_histogram));
  if (config.dtype != StatesDtype::kBf16) {
    STATETAP_ASSIGN_OR_RETURN(statistics.squared_error,
                              file.ReadScalar<double>(path("squared_error")));
  }
  STATETAP_RETURN_IF_ERROR(ReadClasses(file, boundary, &statistics));
  return statistics;
}

absl::Status WriteConfig(Hdf5File* file, const ShardConfig& config) {
  std::vector<int64_t> boundaries, layer_outputs, taps, tap_layer_outputs;
  for (const int boundary : config.boundaries) {
    boundaries.push_back(boundary);
    layer_outputs.push_back(boundary - 1);
    if (boundary == config.layers) continue;
    taps.push_back(boundary);
    tap_layer_outputs.push_back(boundary - 1);
  }
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("format", kShardFormat));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("version", kShardVersion));
  for (const ShardText& text : kShardTexts)
    STATETAP_RETURN_IF_ERROR(file->SetAttribute(text.name, config.*text.field));
  for (const ShardToken& token : kShardTokens)
    STATETAP_RETURN_IF_ERROR(file->SetAttribute(token.name, int64_t{config.*token.field}));
  STATETAP_RETURN_IF_ERROR(
      file->SetAttribute("template_mode", config.thinking ? kThinking : kInstant));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("hidden", int64_t{config.hidden}));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("layers", int64_t{config.layers}));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("boundaries", boundaries));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("layer_outputs", layer_outputs));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("taps", taps));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("tap_layer_outputs", tap_layer_outputs));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("final_norm", std::string_view("pre")));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("rms_norm_eps", config.rms_norm_eps));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("inner_eps", config.inner_eps));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("dtype", NameOf(config.dtype)));
  STATETAP_RETURN_IF_ERROR(file->SetAttribute("created", Now()));
  return file->SetAttribute("complete", int64_t{1});
}

absl::StatusOr<ShardConfig> ReadConfig(const Hdf5File& file) {
  STATETAP_ASSIGN_OR_RETURN(const std::string format, file.StringAttribute("format"));
  if (format != kShardFormat) return Wrong(fmt::format("format is \"{}\"", format));
  STATETAP_ASSIGN_OR_RETURN(const int64_t version, file.IntAttribute("version"));
  if (version != kShardVersion) {
    return absl::FailedPreconditionError(
        fmt::format("shard version {}; this program reads version {}", version, kShardVersion));
  }
  STATETAP_ASSIGN_OR_RETURN(const int64_t complete, file.IntAttribute("complete"));
  if (complete != 1) return Wrong("the shard was not finished");
  ShardConfig config;
  for (const ShardText& text : kShardTexts) {
    STATETAP_ASSIGN_OR_RETURN(config.*text.field, file.StringAttribute(text.name));
  }
  for (const ShardToken& token : kShardTokens) {
    if (!file.HasAttribute(token.name)) continue;
    STATETAP_ASSIGN_OR_RETURN(const int64_t id, file.IntAttribute(token.name));
    if (id < -1 || id > std::numeric_limits<int32_t>::max())
      return Wrong(fmt::format("{} is {}", token.name, id));
    config.*token.field = static_cast<int>(id);
  }
  STATETAP_ASSIGN_OR_RETURN(const std::string mode, file.StringAttribute("template_mode"));
  config.thinking = mode == kThinking;
  STATETAP_ASSIGN_OR_RETURN(const std::string dtype, file.StringAttribute("dtype"));
  const auto* const known = std::find(std::begin(kDtypes), std::end(kDtypes), dtype);
  if (known == std::end(kDtypes)) return Wrong(fmt::format("states of dtype {}", dtype));
  config.dtype = static_cast<StatesDtype>(known - std::begin(kDtypes));
  STATETAP_ASSIGN_OR_RETURN(config.rms_norm_eps, file.DoubleAttribute("rms_norm_eps"));
  STATETAP_ASSIGN_OR_RETURN(config.inner_eps, file.DoubleAttribute("inner_eps"));
  STATETAP_ASSIGN_OR_RETURN(const int64_t hidden, file.IntAttribute("hidden"));
  STATETAP_ASSIGN_OR_RETURN(const int64_t layers, file.IntAttribute("layers"));
  if (hidden < 1 || hidden > kMaxHidden || layers < 1 || layers >= kMaxBoundaries)
    return Wrong(fmt::format("hidden {} and layers {} are out of range", hidden, layers));
  config.hidden = static_cast<int>(hidden);
  config.layers = static_cast<int>(layers);
  STATETAP_ASSIGN_OR_RETURN(const std::vector<int64_t> boundaries,
                            file.IntsAttribute("boundaries", kMaxBoundaries));
  for (const int64_t boundary : boundaries) {
    if (boundary < 0 || boundary > layers ||
        (!config.boundaries.empty() && boundary <= config.boundaries.back()))
      return Wrong(fmt::format("boundary {} of {} layers is out of order", boundary, layers));
    config.boundaries.push_back(static_cast<int>(boundary));
  }
  if (config.boundaries.empty()) return Wrong("no boundaries");
  return config;
}

std::string_view NameOf(StatesDtype dtype) { return kDtypes[static_cast<size_t>(dtype)]; }

size_t NumStatesDatasets(const ShardConfig& config) {
  return config.dtype == StatesDtype::kNone ? 0 : config.boundaries.size();
}

int64_t StatesRowBytes(const ShardConfig& config) {
  const int64_t hidden = config.hidden;
  const int64_t of_boundary =
      config.dtype == StatesDtype::kFp8 ? hidden + int64_t{sizeof(float)} : 2 * hidden;
  return of_boundary * static_cast<int64_t>(NumStatesDatasets(config));
}

std::vector<BulkDataset> BulkDatasetsOf(const ShardConfig& config, int states_rows_per_chunk) {
  std::vector<BulkDataset> datasets;
  const bool fp8 = config.dtype == StatesDtype::kFp8;
  Hdf5RowsShape states{.type = fp8 ? Hdf5Type::kE4m3 : Hdf5Type::kBf16, .width = config.hidden};
  states.rows_per_chunk = states_rows_per_chunk == 0
                              ? RowsPerChunk(states.row_bytes(), kStatesChunkBytes)
                              : AlignedRows(states.row_bytes(), states_rows_per_chunk);
  for (size_t i = 0; i < NumStatesDatasets(config); ++i)
    datasets.push_back({.path = StatesPath(config.boundaries[i]), .shape = states});
  const auto add = [&](std::string_view path, Hdf5Type type) {
    datasets.push_back({.path = std::string(path),
                        .shape = {.type = type, .rows_per_chunk = kTokensRowsPerChunk}});
  };
  add(kTokenIds, Hdf5Type::kI32);
  add(kTokenLossMask, Hdf5Type::kU8);
  add(kTokenLogprob, Hdf5Type::kF32);
  add(kTokenEntropy, Hdf5Type::kF32);
  for (const int boundary : config.boundaries)
    if (fp8) add(ScalesPath(boundary), Hdf5Type::kF32);
  return datasets;
}

}  // namespace statetap
