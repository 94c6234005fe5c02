#!/usr/bin/env bash
# The whole of Statetap on the embedded model, on a CPU: a server loads models/tiny-kimi, answers 64 chats and captures their hidden states in
# the same pass, writes shards, shows statistics, and streams the features to a reader. Installs and builds what is missing first.
#   scripts/demo.sh [FOLDER]     where shards and logs stay [a new one under /tmp]
# STATETAP_DEMO_FLAGS="--backend cuda": more flags for the server (then STATETAP_DEMO_BUILD= builds with CUDA). STATETAP_BIN=FOLDER: programs that
# lie there already, nothing is installed or built.
source "$(dirname "$0")/common.sh"

bin=${STATETAP_BIN:-}
if [ -z "$bin" ]; then
  "$root/scripts/setup.sh"
  say "building (minutes the first time, seconds after that)"
  # shellcheck disable=SC2086
  "$root/scripts/build.sh" --programs ${STATETAP_DEMO_BUILD---cpu-only}
  bin=$root/build/bin
fi

out=${1:-$(mktemp -d /tmp/statetap-demo.XXXXXX)}
mkdir -p "$out"
server=
stop() { [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; } || true; }
trap stop EXIT

say "1. A server with a model in Kimi-K2.5's exact format (log: $out/server.log)"
mkfifo "$out/ready" 2>/dev/null || true
# shellcheck disable=SC2086
"$bin/statetapd" --model "$root/models/tiny-kimi" --data "$out/data" --listen 127.0.0.1:0 --http 127.0.0.1:0 ${STATETAP_DEMO_FLAGS:-} >"$out/ready" 2>"$out/server.log" &
server=$!
read -r ready <"$out/ready" || { tail -n 5 "$out/server.log" >&2; die "the server did not start"; }
rm -f "$out/ready"
echo "$ready"
export STATETAP_SERVER; STATETAP_SERVER=$(sed -n 's/.* grpc=\([^ ]*\).*/\1/p' <<<"$ready")
run() { printf '\n$ statetap %s\n' "$*"; "$bin/statetap" "$@"; }
run model
run ask "What is the capital of France?"

say "2. 64 chats: answered by the model, three taps and the final state captured in the same pass"
run submit "$root/examples/prompts_64.jsonl" --name demo --wait
run show demo

say "3. What was captured"
run samples demo | sed -n 1,8p   # reads to the end: head would break the pipe of whoever still writes
run view demo prompt-64-000000
run stats demo --plot
run check demo

say "4. A reader elsewhere: the features over gRPC into a folder of its own"
run stream demo --out "$out/received"
run shards "$out/received"

cat <<END

The server stops now; everything lies in $out.
Try next:
  build/bin/statetapd --model models/tiny-kimi --data /tmp/statetap          # in one terminal
  build/bin/statetap submit my_chats.jsonl --name mine --wait                 # in another: {"messages": [{"role": "user", "content": "…"}]} a line
  build/bin/statetap tokens my_chats.jsonl --model models/tiny-kimi           # what the model would see
  build/bin/statetap --help
END
