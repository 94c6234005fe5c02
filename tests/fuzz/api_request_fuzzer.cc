// The body of an HTTP request, behind a byte that chooses the endpoint: refused in words that are
// JSON again, or a question that the engine can be given.
#include "server/jobs/ask.h"
#include "server/web/api_reply.h"
#include "server/web/page_access.h"
#include "tests/fuzz/fuzz.h"

using namespace statetap;

namespace {

const ServedModel& Model() {
  static const ServedModel model = [] {
    ServedModel tiny;
    tiny.name = "tiny-kimi";
    tiny.config.vocab = fuzz::TinyKimi().vocab();
    tiny.config.num_layers = 8;
    tiny.tokenizer = {std::shared_ptr<void>(), &fuzz::TinyKimi()};
    tiny.template_kind = TemplateKind::kKimiK25;
    tiny.max_seq_len = 512;
    return tiny;
  }();
  return model;
}

void CheckRefusal(const absl::Status& status) {
  const auto body = ParseJson(ApiErrorBody(status));
  fuzz::Require(body.ok() && !(*body)["error"]["message"].get<std::string>().empty());
  fuzz::Require(HttpStatusOf(status) >= 400 && HttpStatusOf(status) < 500);
}

void CheckAsked(const absl::StatusOr<ApiRequest>& request) {
  if (!request.ok()) return CheckRefusal(request.status());
  fuzz::Require(!request->prompts.empty());
  for (const v1::SampleInput& prompt : request->prompts) {
    const auto task = TaskOfQuestion(prompt, request->options, request->generate, Model());
    if (!task.ok()) {
      CheckRefusal(task.status());
      continue;
    }
    fuzz::Require(task->generate == request->generate && !task->input_ids.empty());
    fuzz::Require(!task->generate || task->max_new_tokens >= 1);
    fuzz::Require(task->input_ids.size() <= 512);
    for (const int32_t id : task->input_ids) fuzz::Require(id >= 0 && id < Model().config.vocab);
  }
}

void CheckIds(const absl::StatusOr<std::vector<int32_t>>& ids) {
  if (!ids.ok()) return CheckRefusal(ids.status());
  fuzz::Require(!Model().tokenizer->Decode(*ids).empty() || ids->empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const ApiDefaults defaults{Model(), 512, 1};
  switch (data[0] % 5) {
    case 0: CheckAsked(ParseCompletionRequest(body, defaults)); break;
    case 1: CheckAsked(ParseChatRequest(body, defaults)); break;
    case 2: CheckIds(ParseTokenizeRequest(body, Model())); break;
    case 3: CheckIds(ParseDetokenizeRequest(body, Model())); break;
    case 4:
      for (const auto& [name, value] : FormFields(body))
        fuzz::Require(name.size() + value.size() <= body.size());
      break;
  }
  return 0;
}
