#include "client/cli/token_text.h"

namespace statetap {
namespace {

class ServerTokenText : public TokenText {
 public:
  explicit ServerTokenText(Client& client) : client_(client) {}
  absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) override {
    STATETAP_ASSIGN_OR_RETURN(std::vector<v1::Rendered> rendered, Render(runs));
    std::vector<std::string> texts;
    for (v1::Rendered& one : rendered) texts.push_back(std::move(*one.mutable_text()));
    return texts;
  }
  absl::StatusOr<std::string> SpecialsOf(const std::vector<int32_t>& ids) override {
    STATETAP_ASSIGN_OR_RETURN(std::vector<v1::Rendered> rendered, Render({ids}));
    return std::move(*rendered[0].mutable_special());
  }

 private:
  absl::StatusOr<std::vector<v1::Rendered>> Render(const std::vector<std::vector<int32_t>>& runs) {
    std::vector<v1::Rendered> answers;
    const auto fill = [&](const Client::SendRender& send) {
      for (const std::vector<int32_t>& run : runs) {
        v1::RenderRequest request;
        request.mutable_options()->set_mode(v1::JOB_MODE_PREFILL);
        request.mutable_sample()->mutable_tokens()->mutable_ids()->Assign(run.begin(), run.end());
        if (!send(request)) return absl::AbortedError("the server ended the call");
      }
      return absl::OkStatus();
    };
    STATETAP_RETURN_IF_ERROR(client_.Render(fill, [&](const v1::Rendered& rendered) {
      answers.push_back(rendered);
      return rendered.error().empty() ? absl::OkStatus() : absl::InternalError(rendered.error());
    }));
    if (answers.size() != runs.size())
      return absl::InternalError("the server answered fewer texts than it was asked for");
    return answers;
  }

  Client& client_;
};

class ModelTokenText : public TokenText {
 public:
  explicit ModelTokenText(const LocalModel& model) : model_(model) {}
  absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) override {
    std::vector<std::string> texts;
    for (const auto& run : runs) texts.push_back(model_.tokenizer().Decode(run));
    return texts;
  }
  absl::StatusOr<std::string> SpecialsOf(const std::vector<int32_t>& ids) override {
    std::string specials;
    for (const int32_t id : ids) specials += model_.tokenizer().IsSpecial(id) ? '\1' : '\0';
    return specials;
  }

 private:
  const LocalModel& model_;
};

}  // namespace

std::unique_ptr<TokenText> TextFromServer(Client& client) {
  return std::make_unique<ServerTokenText>(client);
}
std::unique_ptr<TokenText> TextFromModel(const LocalModel& model) {
  return std::make_unique<ModelTokenText>(model);
}

}  // namespace statetap
