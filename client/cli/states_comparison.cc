#include "client/cli/states_comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "client/cli/format.h"
#include "client/cli/table.h"
#include "client/cli/text_width.h"
#include "client/lib/proto_json.h"
#include "extractor/shard/statistics_kernel.h"

namespace statetap {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double Ratio(double part, double whole) {
  return whole > 0 ? std::sqrt(part / whole)
                   : (part > 0 ? std::numeric_limits<double>::infinity() : 0);
}

// Adds the rows to `to`; relative errors of the rows come back.
std::vector<double> AddRows(std::span<const uint16_t> ours, std::span<const uint16_t> theirs,
                            size_t hidden, BoundaryDifference& to) {
  std::vector<double> errors;
  for (size_t at = 0; at < ours.size(); at += hidden) {
    const auto our_row = ours.subspan(at, hidden), their_row = theirs.subspan(at, hidden);
    const RowSummary our = SummarizeRow(our_row), their = SummarizeRow(their_row);
    if (!our.finite || !their.finite) {
      ++to.nonfinite;
      continue;
    }
    const double dot = MultiplyRows(our_row, their_row).dot;
    const double squared = std::max(0.0, our.sum_of_squares + their.sum_of_squares - 2 * dot);
    ++to.rows;
    to.squared_error += squared;
    to.squares += their.sum_of_squares;
    errors.push_back(Ratio(squared, their.sum_of_squares));
    if (our.zero || their.zero) continue;
    const double cosine = dot / std::sqrt(our.sum_of_squares) / std::sqrt(their.sum_of_squares);
    ++to.compared;
    to.cosine += cosine;
    to.lowest_cosine = std::min(to.lowest_cosine, cosine);
  }
  return errors;
}

double MedianOf(std::vector<double> values) {
  if (values.empty()) return kNan;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// KL and the most probable tokens of one row, over a vocabulary that comes in pieces.
class RowHeads {
 public:
  void Add(double ours, double theirs, int64_t token) {
    if (theirs > their_top_) their_top_ = theirs, their_token_ = token;
    their_sum_.Add(theirs);
    // Σ exp(ours − top)·(ours − theirs), scaled anew whenever a larger logit comes.
    if (ours > our_top_) {
      const double scale = std::exp(our_top_ - ours);
      weight_ *= scale;
      weighted_ *= scale;
      our_top_ = ours;
      our_token_ = token;
    }
    const double share = std::exp(ours - our_top_);
    weight_ += share;
    weighted_ += share * (ours - theirs);
  }
  bool same_top() const { return our_token_ == their_token_; }
  double kl() const {
    return std::max(0.0, weighted_ / weight_ - (our_top_ + std::log(weight_)) + their_sum_.value());
  }

 private:
  static constexpr double kNone = -std::numeric_limits<double>::infinity();
  double our_top_ = kNone, their_top_ = kNone, weight_ = 0, weighted_ = 0;
  int64_t our_token_ = -1, their_token_ = -1;
  LogSumExp their_sum_;
};

std::string Ids(const std::vector<std::string>& ids) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, ids.size()); ++i)
    text += (i == 0 ? "" : ", ") + Printable(ids[i]);
  return text + (ids.size() > kShown ? ", …" : "");
}

}  // namespace

double BoundaryDifference::MeanCosine() const {
  return compared == 0 ? kNan : cosine / static_cast<double>(compared);
}
double BoundaryDifference::RelativeError() const { return Ratio(squared_error, squares); }

BoundaryDifference& StatesComparison::DifferenceAt(int boundary) {
  const auto at =
      std::ranges::lower_bound(boundaries_, boundary, {}, &BoundaryDifference::boundary);
  if (at != boundaries_.end() && at->boundary == boundary) return *at;
  return *boundaries_.insert(at, {.boundary = boundary});
}

absl::Status StatesComparison::Add(const SampleStates& ours, const SampleStates& theirs,
                                   int64_t expected_pairs) {
  const std::string& id = ours.record.id;
  if (ours.hidden != theirs.hidden)
    return absl::FailedPreconditionError(fmt::format(
        "sample \"{}\" has rows of {} values here and of {} there: states of two models", id,
        ours.hidden, theirs.hidden));
  const auto& our_ids = ours.record.input_ids;
  const auto& their_ids = theirs.record.input_ids;
  const size_t shorter = std::min(our_ids.size(), their_ids.size());
  const auto first = our_ids.begin(), last = first + static_cast<ptrdiff_t>(shorter);
  const auto same = std::mismatch(first, last, their_ids.begin()).first - first;
  if (static_cast<size_t>(same) < std::max(our_ids.size(), their_ids.size()))
    other_tokens_.push_back({id, same});

  SampleDifference sample{.id = id, .rows = same, .relative_error = -1};
  const auto hidden = static_cast<size_t>(ours.hidden);
  const size_t values = static_cast<size_t>(same) * hidden;
  for (size_t b = 0; b < ours.boundaries.size(); ++b) {
    const auto there = std::ranges::find(theirs.boundaries, ours.boundaries[b]);
    if (there == theirs.boundaries.end()) continue;
    const auto& their_states =
        theirs.states[static_cast<size_t>(there - theirs.boundaries.begin())];
    BoundaryDifference one{.boundary = ours.boundaries[b]};
    const std::vector<double> errors = AddRows(std::span(ours.states[b]).first(values),
                                               std::span(their_states).first(values), hidden, one);
    BoundaryDifference& all = DifferenceAt(ours.boundaries[b]);
    all.rows += one.rows;
    all.compared += one.compared;
    all.nonfinite += one.nonfinite;
    all.cosine += one.cosine;
    all.lowest_cosine = std::min(all.lowest_cosine, one.lowest_cosine);
    all.squared_error += one.squared_error;
    all.squares += one.squares;
    if (one.RelativeError() <= sample.relative_error) continue;
    sample.boundary = one.boundary;
    sample.relative_error = one.RelativeError();
    sample.cosine = one.MeanCosine();
    sample.median_error = MedianOf(errors);
  }
  if (sample.relative_error < 0)
    return absl::FailedPreconditionError(
        fmt::format("sample \"{}\" has boundaries {} here and {} there, none in common", id,
                    fmt::join(ours.boundaries, ","), fmt::join(theirs.boundaries, ",")));
  KeepForHead(ours, theirs, same, expected_pairs);
  samples_.push_back(std::move(sample));
  return absl::OkStatus();
}

void StatesComparison::KeepForHead(const SampleStates& ours, const SampleStates& theirs,
                                   int64_t rows, int64_t expected_pairs) {
  const auto hidden = static_cast<size_t>(ours.hidden);
  const auto kept = static_cast<int64_t>(our_finals_.size() / hidden);
  const bool final_in_both =
      ours.boundaries.back() == ours.layers && theirs.boundaries.back() == ours.layers;
  const int64_t a_sample = (head_rows_ + expected_pairs - 1) / std::max<int64_t>(1, expected_pairs);
  const int64_t wanted = std::min({a_sample, rows, head_rows_ - kept});
  if (!final_in_both) return;
  for (int64_t i = 0; i < wanted; ++i) {
    const auto at = static_cast<size_t>(i * rows / wanted) * hidden;
    const auto our_row = std::span(ours.states.back()).subspan(at, hidden);
    const auto their_row = std::span(theirs.states.back()).subspan(at, hidden);
    if (!SummarizeRow(our_row).finite || !SummarizeRow(their_row).finite) continue;
    our_finals_.insert(our_finals_.end(), our_row.begin(), our_row.end());
    their_finals_.insert(their_finals_.end(), their_row.begin(), their_row.end());
  }
}

absl::Status StatesComparison::CompareHead(const OutputHead& head) {
  if (our_finals_.empty()) return absl::OkStatus();
  std::vector<uint16_t> both = our_finals_;
  both.insert(both.end(), their_finals_.begin(), their_finals_.end());
  const size_t rows = our_finals_.size() / static_cast<size_t>(head.hidden());
  if (rows * static_cast<size_t>(head.hidden()) != our_finals_.size())
    return absl::InvalidArgumentError(
        fmt::format("--model: its head is for {} values, the states have another width: another "
                    "model's",
                    head.hidden()));
  std::vector<RowHeads> heads(rows);
  STATETAP_RETURN_IF_ERROR(
      head.ForEachPiece(both, [&](int64_t first_token, std::span<const float> logits) {
        const size_t width = logits.size() / (2 * rows);
        for (size_t row = 0; row < rows; ++row) {
          const auto ours = logits.subspan(row * width, width);
          const auto theirs = logits.subspan((rows + row) * width, width);
          for (size_t i = 0; i < width; ++i)
            heads[row].Add(ours[i], theirs[i], first_token + static_cast<int64_t>(i));
        }
      }));
  head_.emplace();
  head_->rows = static_cast<int64_t>(rows);
  for (const RowHeads& row : heads) {
    head_->same_top += row.same_top();
    head_->kl += row.kl() / static_cast<double>(rows);
    head_->highest_kl = std::max(head_->highest_kl, row.kl());
  }
  return absl::OkStatus();
}

int64_t StatesComparison::rows() const {
  int64_t rows = 0;
  for (const SampleDifference& sample : samples_) rows += sample.rows;
  return rows;
}

std::vector<SampleDifference> StatesComparison::Worst(size_t count) const {
  std::vector<SampleDifference> worst = samples_;
  std::ranges::stable_sort(worst, std::greater<>(), &SampleDifference::relative_error);
  worst.resize(std::min(count, worst.size()));
  return worst;
}

Json StatesComparison::ToJson(size_t worst) const {
  Json boundaries = Json::array(), samples = Json::array(), tokens = Json::array();
  for (const BoundaryDifference& b : boundaries_)
    boundaries.push_back(
        {{"boundary", b.boundary},
         {"layer_output", b.boundary - 1},
         {"rows", b.rows},
         {"nonfinite", b.nonfinite},
         {"cosine", JsonNumber(b.MeanCosine())},
         {"lowest_cosine", b.compared == 0 ? Json(nullptr) : Json(b.lowest_cosine)},
         {"relative_error", JsonNumber(b.RelativeError())}});
  for (const SampleDifference& sample : Worst(worst))
    samples.push_back({{"id", sample.id},
                       {"rows", sample.rows},
                       {"boundary", sample.boundary},
                       {"relative_error", JsonNumber(sample.relative_error)},
                       {"median_error", JsonNumber(sample.median_error)},
                       {"cosine", JsonNumber(sample.cosine)}});
  for (const OtherTokens& other : other_tokens_)
    tokens.push_back({{"id", other.id}, {"from_token", other.from_token}});
  Json head = nullptr;
  if (head_)
    head = {
        {"rows", head_->rows},
        {"top1_agreement", static_cast<double>(head_->same_top) / static_cast<double>(head_->rows)},
        {"kl", head_->kl},
        {"highest_kl", head_->highest_kl}};
  return {{"pairs", samples_.size()},
          {"rows", rows()},
          {"boundaries", std::move(boundaries)},
          {"head", std::move(head)},
          {"worst", std::move(samples)},
          {"only_here", only_here},
          {"only_there", only_there},
          {"other_tokens", std::move(tokens)}};
}

void StatesComparison::Print(Context& context, size_t worst) const {
  context.out << fmt::format("{} pairs of samples, {} rows\n", FormatCount(std::ssize(samples_)),
                             FormatCount(rows()));
  Table table({Right("boundary"), Right("layer out"), Right("rows"), Right("cosine"),
               Right("lowest"), Right("relative error"), Right("non-finite")});
  for (const BoundaryDifference& b : boundaries_)
    table.Add({std::to_string(b.boundary), std::to_string(b.boundary - 1), FormatCount(b.rows),
               FormatFixed(b.MeanCosine(), 6),
               b.compared == 0 ? "-" : FormatFixed(b.lowest_cosine, 6),
               FormatNumber(b.RelativeError()), FormatCount(b.nonfinite)});
  context.out << table.Format(context.table_width());
  if (head_)
    context.out << fmt::format(
        "head over {} rows: the same most probable token at {:.2f} %, KL {} nats, at most {}\n",
        FormatCount(head_->rows),
        100 * static_cast<double>(head_->same_top) / static_cast<double>(head_->rows),
        FormatNumber(head_->kl), FormatNumber(head_->highest_kl));
  Table samples({Left("worst samples"), Right("rows"), Right("boundary"), Right("relative error"),
                 Right("median of rows"), Right("cosine")});
  for (const SampleDifference& sample : Worst(worst))
    samples.Add({sample.id, FormatCount(sample.rows), std::to_string(sample.boundary),
                 FormatNumber(sample.relative_error), FormatNumber(sample.median_error),
                 FormatFixed(sample.cosine, 6)});
  if (worst > 0) context.out << '\n' << samples.Format(context.table_width());
  if (!only_here.empty())
    context.out << fmt::format("only here: {} samples: {}\n", FormatCount(std::ssize(only_here)),
                               Ids(only_here));
  if (!only_there.empty())
    context.out << fmt::format("only there: {} samples: {}\n", FormatCount(std::ssize(only_there)),
                               Ids(only_there));
  if (!other_tokens_.empty())
    context.out << fmt::format(
        "other tokens: {} samples, compared up to the first that differs or is not there: {} from "
        "token {}{}\n",
        FormatCount(std::ssize(other_tokens_)), Printable(other_tokens_.front().id),
        other_tokens_.front().from_token, other_tokens_.size() > 1 ? ", …" : "");
}

}  // namespace statetap
