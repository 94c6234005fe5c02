// The commands by file.
#pragma once

#include <vector>

#include "client/cli/command.h"

namespace statetap {

Command SubmitCommand();
Command EstimateCommand();
std::vector<Command> JobCommands();     // list, show, watch, pause, resume, cancel, retry, delete
std::vector<Command> SampleCommands();  // samples, rejected, exclude
std::vector<Command> ShardCommands();   // shards, check
Command TokensCommand();
Command StatsCommand();
Command CompareCommand();
Command ViewCommand();
Command StreamCommand();
std::vector<Command> ExportCommands();  // export, vocab-map
std::vector<Command> ModelCommands();   // model, ask
Command VerifyCommand();
Command MakeCheckpointCommand();
std::vector<Command> ManualCommands();  // manual, completion

}  // namespace statetap
