// view: stored samples, token by token.
#include <algorithm>
#include <cmath>
#include <random>

#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/marked_text.h"
#include "client/cli/sample_source.h"
#include "client/cli/table.h"
#include "client/cli/text_width.h"
#include "extractor/base/dtype.h"
#include "extractor/base/json.h"

namespace statetap {
namespace {

struct ViewFlags {
  std::string source, id, model;
  int random = 0;
  uint64_t seed = 0;
  MarkedTextFlags text;
};

// [token]: length of the row.
std::vector<double> NormsOf(const std::vector<uint16_t>& states, size_t num_tokens) {
  std::vector<double> norms(num_tokens);
  const size_t hidden = num_tokens == 0 ? 0 : states.size() / num_tokens;
  for (size_t t = 0; t < num_tokens; ++t) {
    double sum = 0;
    for (size_t c = 0; c < hidden; ++c) {
      const double value = Bf16ToFloat(states[t * hidden + c]);
      sum += value * value;
    }
    norms[t] = std::sqrt(sum);
  }
  return norms;
}

std::string FormatLogprob(const std::vector<float>& values, size_t t) {
  return t >= values.size() ? "-" : FormatFixed(double{values[t]}, 3);
}

// A text for each token; empty where there is no tokenizer.
absl::StatusOr<std::vector<std::string>> TokenTexts(TokenText* text, const SampleRecord& record) {
  if (text == nullptr) return std::vector<std::string>(record.input_ids.size());
  std::vector<std::vector<int32_t>> runs;
  for (const int32_t id : record.input_ids) runs.push_back({id});
  return text->TextOf(runs);
}

absl::Status PrintSample(Context& context, TokenText* text, const MarkedTextStyle& style,
                         const SampleStates& sample) {
  const SampleRecord& record = sample.record;
  const std::string mask(record.loss_mask.begin(), record.loss_mask.end());
  context.out << fmt::format(
      "{}  source {}  split {}  {} tokens, {} of them prompt, {} supervised  finish {}{}\n",
      Printable(record.id), Printable(record.source), record.split, record.input_ids.size(),
      record.prompt_tokens, std::count(mask.begin(), mask.end(), '\1'), record.finish_reason,
      record.truncated ? ", truncated" : "");
  if (!record.meta_json.empty()) context.out << "meta " << Printable(record.meta_json) << '\n';
  if (text != nullptr) {
    STATETAP_ASSIGN_OR_RETURN(const std::string marked,
                              MarkedText(*text, record.input_ids, mask, record.logprobs, style));
    context.out << marked << "\n\n";
    if (style.colour && style.logprobs) context.out << LogprobLegend() << "\n\n";
  }
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> texts, TokenTexts(text, record));
  std::vector<Column> columns = {Right("token"), Right("id"),      Left("text"),
                                 Right("mask"),  Right("logprob"), Right("entropy")};
  for (const int boundary : sample.boundaries)
    columns.push_back(Right(fmt::format("norm {}", boundary)));
  Table table(columns);
  std::vector<std::vector<double>> norms;
  for (const auto& states : sample.states)
    norms.push_back(NormsOf(states, record.input_ids.size()));
  for (size_t t = 0; t < record.input_ids.size(); ++t) {
    std::vector<std::string> cells = {std::to_string(t),
                                      std::to_string(record.input_ids[t]),
                                      style.whitespace ? VisibleSpace(texts[t]) : texts[t],
                                      std::to_string(record.loss_mask[t]),
                                      FormatLogprob(record.logprobs, t),
                                      FormatLogprob(record.entropies, t)};
    for (const auto& of_boundary : norms) cells.push_back(FormatNumber(of_boundary[t]));
    table.Add(cells);
  }
  context.out << table.Format(context.table_width()) << '\n';
  return absl::OkStatus();
}

Json Floats(const std::vector<float>& values, size_t count) {
  Json list = Json::array();
  for (size_t t = 0; t < count; ++t)
    list.push_back(t < values.size() && std::isfinite(values[t]) ? Json(double{values[t]})
                                                                 : Json(nullptr));
  return list;
}

absl::Status PrintSampleJson(Context& context, TokenText* text, const SampleStates& sample) {
  const SampleRecord& record = sample.record;
  const size_t tokens = record.input_ids.size();
  Json json = {{"id", record.id},
               {"source", record.source},
               {"split", record.split},
               {"prompt_tokens", record.prompt_tokens},
               {"finish_reason", record.finish_reason},
               {"truncated", record.truncated},
               {"meta_json", record.meta_json},
               {"source_index", record.source_index}};
  if (text != nullptr) {
    STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> whole,
                              text->TextOf({record.input_ids}));
    json["text"] = whole[0];
  }
  json["input_ids"] = record.input_ids;
  json["loss_mask"] = record.loss_mask;
  json["logprobs"] = Floats(record.logprobs, tokens);
  json["entropies"] = Floats(record.entropies, tokens);
  Json norms = Json::object();
  for (size_t b = 0; b < sample.boundaries.size(); ++b)
    norms[std::to_string(sample.boundaries[b])] = NormsOf(sample.states[b], tokens);
  json["norms"] = std::move(norms);
  context.PrintJson(json);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ChosenIds(SampleSource& samples, const ViewFlags& flags) {
  if ((flags.random > 0) == !flags.id.empty())
    return absl::InvalidArgumentError("give a sample's ID, or --random N");
  if (flags.random == 0) return std::vector<std::string>{flags.id};
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> all, samples.Ids(/*where=*/""));
  std::vector<std::string> chosen;
  std::mt19937_64 random(flags.seed != 0 ? flags.seed : std::random_device()());
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), flags.random, random);
  if (chosen.empty()) return absl::NotFoundError("no stored samples there yet");
  return chosen;
}

absl::StatusOr<int> View(Context& context, const ViewFlags& flags) {
  STATETAP_ASSIGN_OR_RETURN(const Source source, ParseSource({flags.source}));
  STATETAP_ASSIGN_OR_RETURN(const auto samples, SampleSource::Open(context, source));
  STATETAP_ASSIGN_OR_RETURN(const std::vector<std::string> ids, ChosenIds(*samples, flags));
  std::optional<LocalModel> model;
  std::unique_ptr<TokenText> text;
  if (!flags.model.empty()) {
    STATETAP_ASSIGN_OR_RETURN(model, LocalModel::Open(flags.model));
    text = TextFromModel(*model);
  } else if (!source.job.empty()) {
    STATETAP_ASSIGN_OR_RETURN(Client* const client, context.client());
    text = TextFromServer(*client);
  } else {
    context.Say("ids only; --model DIR (a checkpoint's folder) shows the text too");
  }
  MarkedTextStyle style = StyleFor(context, flags.text);
  style.logprobs = true;
  for (const std::string& id : ids) {
    STATETAP_ASSIGN_OR_RETURN(const SampleStates sample, samples->Read(id));
    STATETAP_RETURN_IF_ERROR(context.json ? PrintSampleJson(context, text.get(), sample)
                                          : PrintSample(context, text.get(), style, sample));
  }
  return kExitDone;
}

}  // namespace

Command ViewCommand() {
  return {"view", "One stored sample: text, mask, ids, log-probabilities and norms by token",
          "Examples:\n  statetap view prompts.jsonl prompt-64-000003\n"
          "  statetap view prompts.jsonl --random 3\n"
          "  statetap view shards/ prompt-64-000003 --model models/tiny-kimi",
          [](CLI::App& app) -> Runner {
            auto flags = std::make_shared<ViewFlags>();
            app.add_option("SOURCE", flags->source, "A job, or a shard file or folder")->required();
            app.add_option("ID", flags->id, "The sample's id");
            app.add_option("--random", flags->random, "N samples by chance instead")
                ->check(CLI::PositiveNumber);
            app.add_option("--seed", flags->seed, "Of that chance [another each time]")
                ->check(RefuseNegative);
            app.add_option("--model", flags->model,
                           "A checkpoint's folder, for the text of local shards");
            AddMarkedTextFlags(app, flags->text);
            return [=](Context& context) { return View(context, *flags); };
          }};
}

}  // namespace statetap
