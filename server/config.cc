#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "extractor/base/file.h"
#include "server/jobs/served_model.h"
#include "server/web/http_server.h"

namespace statetap {
namespace {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substitute = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substitute, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string Nearest(const CLI::App& app, std::string_view flag) {
  flag = flag.substr(0, flag.find('='));
  std::string best;
  size_t least = 1 + flag.size() / 3;  // farther ones would only confuse
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string candidate = "--" + name;
      const size_t distance = EditDistance(flag, candidate);
      if (distance > least) continue;
      least = distance;
      best = candidate;
    }
  }
  return best;
}

// Above 0, at most `most`. The library's own check lets "nan" and "inf" through.
CLI::Validator PositiveUpTo(double most) {
  return CLI::Validator(
      [most](std::string& text) -> std::string {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value > 0 && value <= most) return "";
        return fmt::format("{} is not possible; give a number above 0, at most {}", text, most);
      },
      "POSITIVE");
}
constexpr double kMostGib = 1 << 20;  // a pebibyte

std::string DidYouMean(std::string_view near) {
  return near.empty() ? "" : fmt::format(", did you mean {}?", near);
}

std::string UnknownFlag(const CLI::App& app, const std::string& flag) {
  return fmt::format("statetapd: {} is not known{}; `statetapd --help` lists all\n", flag,
                     DidYouMean(Nearest(app, flag)));
}

// What the library says of a file's name that no flag has, in our words; else as it is.
std::string WrongFile(const CLI::App& app, std::string_view error) {
  constexpr std::string_view kUnknown = "INI was not able to parse ";
  if (!error.starts_with(kUnknown))
    return fmt::format("statetapd: --config: {}; `statetapd --help` lists all names\n", error);
  const std::string name(error.substr(kUnknown.size()));
  const std::string near = Nearest(app, "--" + name);
  return fmt::format(
      "statetapd: --config: {} is not known{}; a file has the names of `statetapd --help` without "
      "the dashes\n",
      name, DidYouMean(near.empty() ? near : near.substr(2)));
}

void AddOptions(CLI::App& app, ServerConfig& config, double& kv_cache_gib, std::string& experts,
                std::string& retain) {
  EngineOptions& engine = config.engine;
  app.set_config("--config", "", "A file with the same names (TOML or INI: model = \"…\")");
  app.add_option("--model", config.model,
                 "Checkpoint folder, or org/name[@revision] in the local Hugging Face cache")
      ->required();
  app.add_option("--data", config.data,
                 "Folder of the job store (a local disk) and, by default, of "
                 "shards; one server at a time")
      ->required();
  app.add_option("--listen", config.listen, "HOST:PORT of gRPC; port 0 picks one")
      ->capture_default_str();
  app.add_option("--http", config.http,
                 "HOST:PORT of the web page, completions, /healthz and /metrics; empty: off")
      ->capture_default_str();
  app.add_option(
         "--http-token", config.http_token,
         "Who gives it to the web page may pause, resume and cancel there (16 characters or "
         "more; in a --config FILE no other user sees it; default: the page only reads)")
      ->check(CLI::Validator(
          [](const std::string& token) {
            const bool fits = token.size() >= 16 && std::ranges::all_of(token, [](char c) {
                                return c > ' ' && c < 0x7f;
                              });
            return fits ? "" : "--http-token: give 16 or more characters of ASCII without spaces";
          },
          "", "token"));
  app.add_option("--shards", config.shards, "Folders where shards go (default: DATA/shards)")
      ->delimiter(',');
  app.add_option(
         "--retain", retain,
         "all: states stay; until-acked: a shard loses its states, and keeps all else, once "
         "every group that reads the job has acknowledged its samples")
      ->check(CLI::IsMember({"all", "until-acked"}))
      ->capture_default_str();
  app.add_option("--max-shard-bytes", config.max_shard_bytes,
                 "Nothing starts while shards take this much (as 500GiB; default: no bound)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  app.add_option("--inner-eps", engine.inner_eps,
                 "eps of the two inner norms (default: the config's rms_norm_eps)")
      ->check(PositiveUpTo(1));
  app.add_option("--backend", engine.backend, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--tp", engine.ranks,
                 "Ranks (default: the GPUs there are, 1 on CPU); more ranks than GPUs share them, "
                 "with a warning")
      ->check(CLI::Range(1, 64));
  app.add_option("--kernels", engine.kernels, "auto, portable or hopper; the CPU has one kind")
      ->check(CLI::IsMember({"auto", "portable", "hopper"}))
      ->capture_default_str();
  app.add_option("--comm", engine.comm,
                 "How GPUs pass rows to each other: peer (they read each other's memory), nccl, or "
                 "auto: peer where they can")
      ->check(CLI::IsMember({"auto", "peer", "nccl"}))
      ->capture_default_str();
  app.add_option("--experts", experts, "expert (whole experts a rank) or tensor (slices of all)")
      ->check(CLI::IsMember({"expert", "tensor"}))
      ->capture_default_str();
  app.add_option("--max-seq-len", engine.max_seq_len,
                 "Longest sample in tokens (default: the model's positions)")
      ->check(CLI::Range(2, 1 << 24));
  app.add_option("--max-batch-tokens", engine.max_batch_tokens,
                 "Tokens of a step (default: 16384 on GPUs, 512 on a CPU)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--kv-cache-gib", kv_cache_gib,
                 "Latent KV cache, of all ranks together (default: nine tenths of what is left on "
                 "GPUs, 1 on a CPU)")
      ->check(PositiveUpTo(kMostGib));
  app.add_option("--host-buffer-gib", config.host_buffer_gib,
                 "Host memory for the states of samples in flight")
      ->check(PositiveUpTo(kMostGib))
      ->capture_default_str();
  app.add_option("--drain-seconds", config.drain_seconds,
                 "After SIGTERM: how long running samples may take to finish; a step that still "
                 "runs two seconds later is left, and its samples run again")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  app.add_option("--engine-failure", config.engine_failure,
                 "stay: stored states are served on and jobs wait; exit: end with 1, for whoever "
                 "starts the server again")
      ->check(CLI::IsMember({"stay", "exit"}))
      ->capture_default_str();
}

}  // namespace

ParsedArguments ParseArguments(int argc, const char* const* argv) {
  ServerConfig config;
  config.engine.backend = "auto";
  config.engine.ranks = 0;             // the GPUs there are
  config.engine.max_batch_tokens = 0;  // as suits the backend
  double kv_cache_gib = 0;             // as suits the backend
  std::string experts = "expert", retain = "all";
  CLI::App app("Statetap's server: generates answers and stores the model's hidden states.",
               "statetapd");
  app.set_version_flag("--version", std::string(kProducer));
  app.allow_extras();
  app.allow_config_extras(CLI::config_extras_mode::error);
  AddOptions(app, config, kv_cache_gib, experts, retain);
  const auto wrong = [](std::string text) {
    return ParsedArguments{std::nullopt, 2, std::move(text)};
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {
    std::ostringstream out;
    app.exit(done, out, out);
    return {std::nullopt, 0, out.str()};
  } catch (const CLI::RequiredError& error) {
    // A mistyped required flag is unknown first and missing second: say the first.
    for (const std::string& extra : app.remaining()) {
      if (extra.starts_with("-")) return wrong(UnknownFlag(app, extra));
    }
    return wrong(fmt::format("statetapd: {}; `statetapd --help` lists all\n", error.what()));
  } catch (const CLI::ConfigError& error) {
    return wrong(WrongFile(app, error.what()));
  } catch (const CLI::ParseError& error) {
    return wrong(fmt::format("statetapd: {}; `statetapd --help` lists all\n", error.what()));
  }
  if (!app.remaining().empty()) return wrong(UnknownFlag(app, app.remaining().front()));
  for (const std::string* address : {&config.listen, &config.http}) {
    if (address == &config.http && address->empty()) continue;
    const auto parsed = ParseHostPort(*address);
    if (!parsed.ok()) {
      return wrong(fmt::format("statetapd: {}: {}\n",
                               address == &config.http ? "--http" : "--listen",
                               MessageOf(parsed.status())));
    }
  }
  config.engine.kv_cache_bytes = static_cast<int64_t>(kv_cache_gib * 0x1p30);
  config.retain_until_acknowledged = retain == "until-acked";
  config.engine.experts =
      experts == "tensor" ? EngineOptions::Experts::kTensor : EngineOptions::Experts::kExpert;
  return {std::move(config), 0, ""};
}

}  // namespace statetap
