// make-checkpoint: random weights in the real layout.
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "extractor/checkpoint/maker.h"

namespace statetap {
namespace {

struct MakeFlags {
  std::string folder;
  MakeOptions options;
};

absl::StatusOr<int> Make(Context& context, MakeFlags flags) {
  const auto progress = context.MakeProgress();
  flags.options.progress = [&](int64_t done, int64_t total) {
    progress->ShowBytes("writing", done, total);
  };
  const absl::StatusOr<MakeResult> made = MakeCheckpoint(flags.folder, flags.options);
  progress->Clear();
  STATETAP_RETURN_IF_ERROR(made.status());
  if (context.json) {
    context.PrintJson({{"path", flags.folder},
                       {"tensors", made->tensors},
                       {"bytes", made->bytes},
                       {"files", made->files}});
  } else {
    context.out << fmt::format("{}: {} tensors, {} in {} files\n", flags.folder,
                               FormatCount(made->tensors), FormatBytes(made->bytes), made->files);
  }
  context.Say(fmt::format("serve it with `statetapd --model {} --data DIR`", flags.folder));
  return kExitDone;
}

}  // namespace

Command MakeCheckpointCommand() {
  return {
      "make-checkpoint", "Random weights in Kimi-K2.5's layout, for tests and load benches",
      "kimi-k2.5 has 61 layers of about 9.8 GB; --layers makes it fit.\n\n"
      "Examples:\n  statetap make-checkpoint /tmp/tiny --preset tiny\n"
      "  statetap make-checkpoint /data/k2.5-4 --preset kimi-k2.5 --layers 4 --seed 7",
      [](CLI::App& app) -> Runner {
        auto flags = std::make_shared<MakeFlags>();
        app.add_option("DIR", flags->folder, "Folder to make; must be new or empty")->required();
        app.add_option("--preset", flags->options.preset, "tiny, mid or kimi-k2.5 [tiny]")
            ->check(CLI::IsMember({"tiny", "mid", "kimi-k2.5"}));
        app.add_option("--layers", flags->options.layers, "Decoder layers [the preset's]")
            ->check(CLI::PositiveNumber);
        app.add_option("--seed", flags->options.seed, "Of the weights [0]")->check(RefuseNegative);
        return [=](Context& context) { return Make(context, *flags); };
      }};
}

}  // namespace statetap
