// compare, and what else compares two captures.
#include "client/cli/compare.h"

#include <algorithm>
#include <unordered_set>

#include "client/cli/commands.h"
#include "client/cli/foreign_states.h"
#include "client/cli/format.h"

namespace statetap {
namespace {

struct ForeignFlags {
  std::vector<std::string> source;
  std::string with;
  std::vector<int> boundaries;  // of the slots; empty: those of the sample
  CompareFlags compare;
};

absl::StatusOr<int> Finish(Context& context, StatesComparison& comparison,
                           const CompareFlags& flags) {
  if (comparison.samples().empty())
    return absl::FailedPreconditionError(
        fmt::format("nothing to compare: {} samples here and {} there, none in both",
                    comparison.only_here.size(), comparison.only_there.size()));
  if (flags.model.empty()) {
    context.Say("the head is not compared; --model DIR (a checkpoint's folder) does that too");
  } else {
    STATETAP_ASSIGN_OR_RETURN(const OutputHead head, OutputHead::Open(flags.model));
    STATETAP_RETURN_IF_ERROR(comparison.CompareHead(head));
  }
  if (context.json) {
    context.PrintJson(comparison.ToJson(flags.worst));
  } else {
    comparison.Print(context, flags.worst);
  }
  if (flags.max_error == 0) return kExitDone;
  for (const BoundaryDifference& boundary : comparison.boundaries()) {
    if (boundary.RelativeError() <= flags.max_error) continue;
    context.Say(fmt::format("boundary {}: a relative error of {} is above --max-error {}",
                            boundary.boundary, FormatNumber(boundary.RelativeError()),
                            FormatNumber(flags.max_error)));
    return kExitFailed;
  }
  return kExitDone;
}

absl::StatusOr<int> CompareForeign(Context& context, const ForeignFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource(flags.source));
  STATETAP_ASSIGN_OR_RETURN(ForeignStates foreign, ForeignStates::Open(flags.with));
  STATETAP_ASSIGN_OR_RETURN(const auto ours, SampleSource::Open(context, source));
  STATETAP_ASSIGN_OR_RETURN(const auto ids, ours->Ids(flags.compare.where));
  STATETAP_ASSIGN_OR_RETURN(
      StatesComparison comparison,
      ComparePairs(
          context, *ours, ids,
          [&](const SampleStates& sample) {
            return foreign.Find(sample.record.input_ids,
                                flags.boundaries.empty() ? sample.boundaries : flags.boundaries,
                                sample.layers);
          },
          flags.compare));
  if (flags.compare.pairs == 0) comparison.only_there = foreign.Unused();
  return Finish(context, comparison, flags.compare);
}

}  // namespace

void AddCompareFlags(CLI::App& app, CompareFlags& flags) {
  app.add_option("--pairs", flags.pairs, "Compare N samples, evenly spread [all]")
      ->check(RefuseNegative);
  app.add_option("--head-rows", flags.head_rows,
                 "Final states that go through the head of --model, evenly spread [256]")
      ->check(RefuseNegative);
  app.add_option("--worst", flags.worst, "How many of the worst samples are named [10]")
      ->check(RefuseNegative);
  app.add_option("--max-error", flags.max_error,
                 "Exit 1 where a boundary's relative error is above this [no bound]")
      ->check(RefuseNegative);
}

std::vector<std::string> EvenlySpread(const std::vector<std::string>& ids, int64_t count) {
  const auto all = static_cast<int64_t>(ids.size());
  if (count == 0 || count >= all) return ids;
  std::vector<std::string> chosen;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(ids[static_cast<size_t>(i * all / count)]);
  return chosen;
}

absl::StatusOr<StatesComparison> ComparePairs(Context& context, SampleSource& ours,
                                              const std::vector<std::string>& ids,
                                              const Counterpart& counterpart,
                                              const CompareFlags& flags) {
  const std::vector<std::string> chosen = EvenlySpread(ids, flags.pairs);
  const auto total = static_cast<int64_t>(chosen.size());
  StatesComparison comparison(flags.model.empty() ? 0 : flags.head_rows);
  const auto progress = context.MakeProgress();
  for (int64_t i = 0; i < total; ++i) {
    if (context.interrupted()) return absl::CancelledError("interrupted");
    progress->ShowCount("comparing samples", i, total);
    STATETAP_ASSIGN_OR_RETURN(const SampleStates sample, ours.Read(chosen[static_cast<size_t>(i)]));
    STATETAP_ASSIGN_OR_RETURN(const std::optional<SampleStates> other, counterpart(sample));
    if (other) {
      STATETAP_RETURN_IF_ERROR(comparison.Add(sample, *other, total));
    } else {
      comparison.only_here.push_back(sample.record.id);
    }
  }
  return comparison;
}

absl::StatusOr<int> CompareSources(Context& context, const std::vector<std::string>& ours,
                                   const std::string& theirs, const CompareFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Source our_source, ParseSource(ours));
  STATETAP_ASSIGN_OR_RETURN(const Source their_source, ParseSource({theirs}));
  STATETAP_ASSIGN_OR_RETURN(const auto our_samples, SampleSource::Open(context, our_source));
  STATETAP_ASSIGN_OR_RETURN(const auto their_samples, SampleSource::Open(context, their_source));
  STATETAP_ASSIGN_OR_RETURN(const auto our_ids, our_samples->Ids(flags.where));
  STATETAP_ASSIGN_OR_RETURN(const auto their_ids, their_samples->Ids(flags.where));
  const std::unordered_set<std::string> here(our_ids.begin(), our_ids.end());
  const std::unordered_set<std::string> there(their_ids.begin(), their_ids.end());
  std::vector<std::string> common, only_here;
  for (const std::string& id : our_ids) (there.contains(id) ? common : only_here).push_back(id);
  STATETAP_ASSIGN_OR_RETURN(
      StatesComparison comparison,
      ComparePairs(
          context, *our_samples, common,
          [&](const SampleStates& sample) -> absl::StatusOr<std::optional<SampleStates>> {
            return their_samples->Read(sample.record.id);
          },
          flags));
  comparison.only_here = std::move(only_here);
  for (const std::string& id : their_ids)
    if (!here.contains(id)) comparison.only_there.push_back(id);
  return Finish(context, comparison, flags);
}

Command CompareCommand() {
  return {
      "compare", "States beside those that another engine wrote for the same tokens",
      "DIR holds safetensors files of vLLM's connector or of speculators: hidden_states [tokens, "
      "slots, hidden],\ntoken_ids [tokens]; DIR/hidden_states is looked at first. A sample is "
      "compared with the longest file that it\nbegins with: vLLM writes prompts alone, or all but "
      "the last token. Slots are the samples' boundaries\nunless --boundaries says which. Relative "
      "error: length of the "
      "difference over that of theirs, of all rows. KL: of our head's\ndistributions against "
      "theirs, nats. Two jobs of ours: stats JOB --compare OTHER.\n\n"
      "Examples:\n  statetap compare mine --with vllm-states/ --model models/tiny-kimi\n"
      "  statetap compare shards/ --with data/ --boundaries 2,4,5,8 --max-error 0.02",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<ForeignFlags>();
        app.add_option("SOURCE", flags->source, "One job, or any number of shard files and folders")
            ->required();
        app.add_option("--with", flags->with, "The folder of the other engine's files")->required();
        app.add_option("--boundaries", flags->boundaries,
                       "What their slots are, in their order [the samples' boundaries]")
            ->delimiter(',');
        app.add_option("--model", flags->compare.model,
                       "A checkpoint's folder, for the head: top-1 agreement and KL");
        app.add_option("--where", flags->compare.where, std::string(kWhereHelp));
        AddCompareFlags(app, flags->compare);
        return [=](Context& context) { return CompareForeign(context, *flags); };
      }};
}

}  // namespace statetap
