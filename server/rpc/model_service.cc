#include "server/rpc/model_service.h"

#include <chrono>

#include "extractor/base/digest.h"
#include "server/jobs/ask.h"
#include "server/jobs/estimate.h"
#include "server/rpc/convert.h"

namespace statetap {
namespace {

// How often a call that waits for its answer looks whether its caller is still there.
constexpr std::chrono::milliseconds kPatience{200};

void AddMemory(v1::ModelDescription& description, std::string_view what, int64_t bytes) {
  if (bytes == 0) return;
  v1::Memory& memory = *description.add_memory();
  memory.set_what(std::string(what));
  memory.set_bytes(bytes);
}

}  // namespace

grpc::Status ModelService::DescribeModel(grpc::ServerContext*, const v1::DescribeModelRequest*,
                                         v1::ModelDescription* response) {
  const ServedModel& model = context_.model;
  const EngineOptions& options = context_.engine.options();
  const EngineInfo::Memory memory = context_.engine.info().AllRanks();
  response->set_name(model.name);
  response->set_path(model.path);
  response->set_architecture(model.config.architecture);
  response->set_layers(model.config.num_layers);
  response->set_hidden(model.config.hidden);
  response->set_vocab(model.config.vocab);
  response->set_experts(model.config.num_experts);
  response->set_top_k(model.config.top_k);
  response->set_quantization(std::string(model.quantization()));
  for (const int tap : model.DefaultTaps()) {
    response->add_taps(tap);
    response->add_tap_layer_outputs(tap - 1);
  }
  response->set_weight_digest(model.digest);
  response->set_tokenizer_digest(model.tokenizer->digest());
  response->set_template_(std::string(NameOf(model.template_kind)));
  response->set_template_digest(TemplateDigest(model.template_kind));
  response->set_backend(options.backend);
  response->set_ranks(options.ranks);
  response->set_kernels(options.backend == "cpu" ? "reference" : options.kernels);
  response->set_expert_layout(options.experts == EngineOptions::Experts::kExpert ? "expert"
                                                                                 : "tensor");
  response->set_inner_eps(model.inner_eps);
  response->set_max_seq_len(model.max_seq_len);
  response->set_max_batch_tokens(options.max_batch_tokens);
  AddMemory(*response, "weights", memory.weights);
  AddMemory(*response, "KV cache", memory.kv_cache);
  AddMemory(*response, "workspace", memory.workspace);
  AddMemory(*response, "capture buffers", memory.capture);
  AddMemory(*response, "host buffers of states", memory.host);
  response->set_version(std::string(kProducer.substr(kProducer.find(' ') + 1)));
  response->set_parameters(model.parameters);
  return grpc::Status::OK;
}

grpc::Status ModelService::Render(
    grpc::ServerContext*, grpc::ServerReaderWriter<v1::Rendered, v1::RenderRequest>* stream) {
  v1::JobOptions options;
  v1::RenderRequest request;
  while (stream->Read(&request)) {
    if (context_.draining) return ToGrpc(Draining());
    if (request.has_options()) {
      options = request.options();
      const absl::StatusOr<TextPlan> plan =
          PlanText(options, MayGenerate(options), context_.model.template_kind);
      if (!plan.ok()) return ToGrpc(plan.status());
    }
    if (!request.has_sample()) continue;
    for (const v1::Rendered& one : RenderSample(request.sample(), options, context_.model.text())) {
      if (!stream->Write(one)) return grpc::Status::OK;
    }
  }
  return grpc::Status::OK;
}

grpc::Status ModelService::Estimate(grpc::ServerContext*,
                                    grpc::ServerReader<v1::EstimateRequest>* reader,
                                    v1::EstimateResponse* response) {
  const auto estimate = [&]() -> absl::Status {
    std::optional<Estimator> estimator;
    v1::EstimateRequest request;
    while (reader->Read(&request)) {
      if (context_.draining) return Draining();
      if (!estimator) {
        STATETAP_ASSIGN_OR_RETURN(estimator, Estimator::Begin(context_.store, context_.model,
                                                              request.options(), request.pilot()));
      } else if (request.has_options() || !request.pilot().empty()) {
        return absl::InvalidArgumentError("options, pilot: only the first message may have them");
      }
      STATETAP_RETURN_IF_ERROR(estimator->Add(request.samples()));
    }
    if (!estimator) return absl::InvalidArgumentError("options: no message came");
    STATETAP_ASSIGN_OR_RETURN(*response, estimator->Finish(context_.folders.FreeBytes()));
    return absl::OkStatus();
  };
  return ToGrpc(estimate());
}

grpc::Status ModelService::Generate(grpc::ServerContext* call, const v1::GenerateRequest* request,
                                    grpc::ServerWriter<v1::GenerateResponse>* writer) {
  const auto begun = std::chrono::steady_clock::now();
  absl::StatusOr<SampleTask> task = TaskOfQuestion(request->sample(), request->options(),
                                                   /*generate=*/true, context_.model);
  if (!task.ok()) return ToGrpc(task.status());
  absl::StatusOr<std::shared_ptr<Answer>> answer = context_.runner.Ask(*std::move(task));
  if (!answer.ok()) return ToGrpc(answer.status());
  AnswerReader reader(*std::move(answer), context_.model);
  AnswerReader::Token token;
  int32_t tokens = 0;
  while (true) {
    const AnswerReader::Event event = reader.Next(kPatience, &token);
    if (event == AnswerReader::Event::kEnd) break;
    if (call->IsCancelled()) return Cut(context_);
    if (event == AnswerReader::Event::kNothingYet) continue;
    v1::GenerateResponse response;
    response.set_token(token.id);
    response.set_text(token.text);
    response.set_logprob(token.score.logprob);
    ++tokens;
    if (!writer->Write(response)) return Cut(context_);
  }
  if (!reader.status().ok()) return ToGrpc(reader.status());
  v1::GenerateResponse last;
  last.set_text(reader.Rest());
  last.set_token(-1);
  last.set_finish_reason(std::string(reader.finish_reason()));
  last.set_prompt_tokens(static_cast<int32_t>(reader.task().input_ids.size()));
  last.set_tokens(tokens);
  last.set_seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  writer->Write(last);
  return grpc::Status::OK;
}

}  // namespace statetap
