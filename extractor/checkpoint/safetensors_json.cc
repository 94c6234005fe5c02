#include "extractor/checkpoint/safetensors_json.h"

#include <limits>

#include "extractor/base/json.h"

namespace statetap {
namespace {

constexpr size_t kMostNameBytes = 1024;
constexpr size_t kMostDims = 16;

// Takes the library's events; every event is refused unless a class below allows it.
class Sax : public nlohmann::json_sax<Json> {
 public:
  absl::Status Parse(std::string_view text) {
    const bool done = Json::sax_parse(text.begin(), text.end(), this);
    if (!fault_.empty()) return absl::InvalidArgumentError(fault_);
    if (!done) return absl::InvalidArgumentError("no valid JSON");
    return absl::OkStatus();
  }

  bool null() override { return Refuse("null"); }
  bool boolean(bool) override { return Refuse("true or false"); }
  bool number_integer(number_integer_t) override { return Refuse("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { return Refuse("a number"); }
  bool number_float(number_float_t, const string_t&) override { return Refuse("a fraction"); }
  bool string(string_t&) override { return Refuse("a string"); }
  bool binary(binary_t&) override { return Refuse("binary data"); }
  bool start_object(size_t) override { return Refuse("an object"); }
  bool end_object() override { return Refuse("the end of an object"); }
  bool start_array(size_t) override { return Refuse("an array"); }
  bool end_array() override { return Refuse("the end of an array"); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(fmt::format("no valid JSON at byte {}", position));
  }

 protected:
  bool Fail(std::string message) {
    if (fault_.empty()) fault_ = std::move(message);
    return false;
  }
  virtual std::string Place() const = 0;
  bool Refuse(std::string_view what) { return Fail(fmt::format("{}: {} found", Place(), what)); }
  bool CheckName(std::string_view name) {
    if (name.size() <= kMostNameBytes) return true;
    return Fail(fmt::format("a name of {} bytes ({}…); at most {} are read", name.size(),
                            name.substr(0, 40), kMostNameBytes));
  }

 private:
  std::string fault_;
};

class HeaderSax : public Sax {
 public:
  std::vector<HeaderTensor> tensors;

  bool start_object(size_t) override {
    switch (state_) {
      case State::kBegin: return Go(State::kNames);
      case State::kTensor: return Go(State::kFields);
      case State::kMetadata: return Go(State::kMetadataFields);
      default: return Refuse("an object");
    }
  }
  bool end_object() override {
    switch (state_) {
      case State::kNames: return Go(State::kEnd);
      case State::kMetadataFields: return Go(State::kNames);
      case State::kFields: return EndTensor();
      default: return Refuse("the end of an object");
    }
  }
  bool key(string_t& key) override {
    switch (state_) {
      case State::kNames: return StartEntry(key);
      case State::kFields: return StartField(key);
      case State::kMetadataFields: return true;
      default: return Refuse("a key");
    }
  }
  bool string(string_t& value) override {
    if (state_ == State::kMetadataFields) return true;
    if (state_ != State::kDtype) return Refuse("a string");
    if (value.size() > 16) return Refuse("a long string");
    tensors.back().dtype = value;
    return Go(State::kFields);
  }
  bool start_array(size_t) override {
    if (state_ == State::kShape) return Go(State::kDims);
    if (state_ == State::kOffsets) return Go(State::kOffsetNumbers);
    return Refuse("an array");
  }
  bool number_unsigned(number_unsigned_t number) override {
    if (number > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return Refuse(fmt::format("{}, beyond 64 bits with sign,", number));
    }
    if (state_ == State::kDims) {
      if (tensors.back().shape.size() == kMostDims) return Refuse("a 17th dimension");
      tensors.back().shape.push_back(static_cast<int64_t>(number));
      return true;
    }
    if (state_ != State::kOffsetNumbers || num_offsets_ == 2) return Refuse("a number");
    (num_offsets_++ == 0 ? tensors.back().begin : tensors.back().end) =
        static_cast<int64_t>(number);
    return true;
  }
  bool end_array() override {
    if (state_ == State::kOffsetNumbers && num_offsets_ != 2) return Refuse("one offset, not two,");
    if (state_ == State::kDims || state_ == State::kOffsetNumbers) return Go(State::kFields);
    return Refuse("the end of an array");
  }

 private:
  enum class State {
    kBegin,
    kNames,
    kMetadata,
    kMetadataFields,
    kTensor,
    kFields,
    kDtype,
    kShape,
    kDims,
    kOffsets,
    kOffsetNumbers,
    kEnd
  };

  bool Go(State state) {
    state_ = state;
    return true;
  }
  bool StartEntry(std::string& name) {
    if (!CheckName(name)) return false;
    if (name == "__metadata__") {
      if (has_metadata_) return Refuse("__metadata__ twice");
      has_metadata_ = true;
      return Go(State::kMetadata);
    }
    tensors.push_back({.name = std::move(name)});
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return Go(State::kTensor);
  }
  bool StartField(std::string_view field) {
    bool* seen = field == "dtype"          ? &has_dtype_
                 : field == "shape"        ? &has_shape_
                 : field == "data_offsets" ? &has_offsets_
                                           : nullptr;
    if (seen == nullptr) return Refuse(fmt::format("the field \"{}\"", field.substr(0, 40)));
    if (*seen) return Refuse(fmt::format("{} twice", field));
    *seen = true;
    num_offsets_ = 0;
    return Go(seen == &has_dtype_   ? State::kDtype
              : seen == &has_shape_ ? State::kShape
                                    : State::kOffsets);
  }
  bool EndTensor() {
    if (!has_dtype_) return Refuse("no dtype");
    if (!has_shape_) return Refuse("no shape");
    if (!has_offsets_) return Refuse("no data_offsets");
    return Go(State::kNames);
  }
  std::string Place() const override {
    switch (state_) {
      case State::kBegin:
      case State::kNames:
      case State::kEnd: return "header";
      case State::kMetadata:
      case State::kMetadataFields: return "__metadata__ (an object of strings)";
      default: return fmt::format("tensor {}", tensors.back().name);
    }
  }

  State state_ = State::kBegin;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int num_offsets_ = 0;
};

class IndexSax : public Sax {
 public:
  IndexJson index;
  bool has_map = false;

  bool null() override { return Other("null"); }
  bool boolean(bool) override { return Other("true or false"); }
  bool number_integer(number_integer_t) override { return Other("a number"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (at_total_ && depth_ == 2 && value <= uint64_t{INT64_MAX}) {
      index.total_size = static_cast<int64_t>(value);
    }
    return Other("a number");
  }
  bool number_float(number_float_t, const string_t&) override { return Other("a number"); }
  bool string(string_t& value) override {
    if (!InMap()) return Other("a string");
    if (!CheckName(value)) return false;
    index.weight_map.back().second = std::move(value);
    return true;
  }
  bool start_object(size_t) override { return Open("an object"); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return depth_ == 0 ? Refuse("an array") : Open("an array"); }
  bool end_array() override { return Close(); }
  bool key(string_t& key) override {
    if (depth_ == 1) {
      at_map_ = key == "weight_map";
      at_metadata_ = key == "metadata";
      if (at_map_ && has_map) return Refuse("weight_map twice");
      has_map |= at_map_;
    } else if (InMap()) {
      if (!CheckName(key)) return false;
      index.weight_map.emplace_back(std::move(key), "");
    }
    at_total_ = at_metadata_ && depth_ == 2 && key == "total_size";
    return true;
  }

 private:
  bool InMap() const { return at_map_ && depth_ == 2; }
  // Values beside weight_map are nothing to us; weight_map is an object of strings.
  bool Other(std::string_view what) { return depth_ == 0 || at_map_ ? Refuse(what) : true; }
  bool Open(std::string_view what) {
    if (at_map_ && (depth_ != 1 || what != "an object")) return Refuse(what);
    if (depth_ == 64) return Refuse("a 65th level");
    ++depth_;
    return true;
  }
  bool Close() {
    if (--depth_ == 1) at_map_ = false;
    return true;
  }
  std::string Place() const override {
    return at_map_ ? "weight_map (an object of strings)" : "index";
  }

  int depth_ = 0;
  bool at_map_ = false, at_metadata_ = false, at_total_ = false;
};

}  // namespace

absl::StatusOr<std::vector<HeaderTensor>> ParseHeaderJson(std::string_view text) {
  HeaderSax sax;
  // The format says so; a header that starts otherwise is not one.
  if (text.empty() || text.front() != '{') {
    return absl::InvalidArgumentError("the header does not begin with {");
  }
  STATETAP_RETURN_IF_ERROR(sax.Parse(text));
  return std::move(sax.tensors);
}

absl::StatusOr<IndexJson> ParseIndexJson(std::string_view text) {
  IndexSax sax;
  STATETAP_RETURN_IF_ERROR(sax.Parse(text));
  if (!sax.has_map) return absl::InvalidArgumentError("weight_map missing");
  return std::move(sax.index);
}

}  // namespace statetap
