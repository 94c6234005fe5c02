#!/bin/bash
# A whole node of eight GPUs in one call of less than ten minutes: the model on 2, 4 and 8 ranks against the reference, exchanges beside NCCL's own,
# all of Kimi-K2.5's layers with random weights (steps with exchanges and without, jobs into memory and onto the disk, one stream), dead and stuck ranks.
#   scripts/eight_gpu.sh            builds first, into build-gpu/
#   scripts/eight_gpu.sh FOLDER     runs the programs that lie in FOLDER, with FOLDER/lib in the library path
# With fewer GPUs it is a dry run, as the first lines say: on one, eight ranks share it and NCCL is left out; on two, the benches have two ranks over
# both carriers; on four, four. Layers are as many as fit or fewer. What is left out is listed at the end. Exit 0: all that can run here passed.
# STATETAP_EXCHANGES=N: random exchanges a carrier [50]. STATETAP_MID=FOLDER: the checkpoint of tests/reference/make.sh mid, made if missing.
# STATETAP_DISK=FOLDER: on the disk that jobs write to [/var/tmp].
#
# Seconds expected on eight GPUs, and the limit (no part begins past $most seconds, none goes on past it):
#   exchanges 20 (60)   tiny-kimi 2 × 25 (60)   engine and faults 60 (100)   mid 53 beside those (120), then 65 + 25 (100)
#   exchange_bench 25 (60)   node 90 (150)   forward 25 (60)   jobs 20 + 60 + 80 (40, 110, 110)     in all 480 to 530
source "$(dirname "$0")/gpu_common.sh"
programs "${1:-}" cuda_group_test cuda_reference_test cuda_engine_test exchange_bench rank_bench random_server statetapd statetap
SECONDS=0 most=585
export NCCL_NVLS_ENABLE=0   # multicast can put the GPUs of a shared host out of service
log=${OUT:-$(mktemp -d)}
left_out=()
skip() { left_out+=("$*"); }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || { echo "no GPU here: nothing was tested"; exit 1; }
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
comms=(peer nccl)
case $gpus in
  1) ranks=8 layers=3 comms=(peer) ;;
  2 | 3) ranks=2 layers=8 ;;
  4 | 5 | 6 | 7) ranks=4 layers=32 ;;
  *) ranks=8 layers=61 ;;
esac
dry=
if [ "$gpus" -lt 8 ]; then
  dry=1
  skip "the real shape, eight ranks on eight GPUs with 61 layers: $gpus here, $ranks ranks in the benches, $layers layers"
fi
[ "$gpus" -ge 8 ] || skip "NCCL with more than $gpus ranks: it has no two on a GPU"
echo "$gpus GPUs, benches with $ranks ranks and $layers layers${dry:+: A DRY RUN, its times mean nothing}"

within() {  # NAME SECONDS COMMAND…: run, as far as there is time
  local name=$1 limit=$2 time=$((most - SECONDS))
  if [ $time -lt 10 ]; then
    skip "$name: the ten minutes were over"
    status=1
    return 1
  fi
  run "$name" $((limit < time ? limit : time)) "${@:3}"
}
show() { grep -hE "$2" "$log/$1.log" 2>/dev/null | sed 's/^/    /'; }  # NAME PATTERN: these lines of its log

# 1. The same numbers as the reference, the same bits everywhere. The checkpoint `mid` is made meanwhile.
export STATETAP_MID=${STATETAP_MID:-$log/mid}
making=
if [ ! -e "$STATETAP_MID/reference.safetensors" ]; then
  if env -u LD_LIBRARY_PATH python3 -c 'import torch, transformers, safetensors' 2>/dev/null; then
    DEVICE=cuda env -u LD_LIBRARY_PATH timeout -k 5 120 tests/reference/make.sh mid "$STATETAP_MID" >"$log/mid.log" 2>&1 &
    making=$!
  else
    skip "mid: python3 has no torch, transformers and safetensors"
    unset STATETAP_MID
  fi
fi
export STATETAP_EXCHANGES=${STATETAP_EXCHANGES:-50}
within exchanges 60 "$(program cuda_group_test)" --gtest_color=no --gtest_filter="*Fault*:$(of '*CudaGroupTest*' {Peer,Nccl}{2,4,8})"
for comm in "${comms[@]}"; do   # TP 2, 4, 8, whole experts and slices, the residual replicated and sharded
  STATETAP_COMM=$comm within "tiny-kimi-$comm" 60 "$(program cuda_reference_test)" --gtest_color=no --gtest_filter="$(of '*CudaRanksTest*' {4..15})"
  STATETAP_COMM=$comm within "answers-$comm" 60 "$(program cuda_engine_test)" --gtest_color=no --gtest_filter="$(of '*Greedy*' {2..7}):*Bits*:*Comm*:*WarmUp*"
done
within faults 100 "$(program cuda_engine_test)" --gtest_color=no --gtest_filter='*Fault*'
if [ -n "$making" ] && ! wait "$making"; then
  echo "mid: making it failed"; tail -n 5 "$log/mid.log"
  status=1
  unset STATETAP_MID
fi
for comm in "${comms[@]}"; do   # over NCCL with eight ranks alone: a case takes five seconds
  cases=({4..15})
  [ "$comm" = peer ] || cases=({12..15})
  [ -z "${STATETAP_MID:-}" ] || STATETAP_COMM=$comm within "mid-$comm" 100 "$(program cuda_reference_test)" --gtest_color=no --gtest_filter="$(of '*CudaMidTest*' "${cases[@]}")"
done
rm -rf "${log:?}/mid"

# 2. Exchanges of 14 KB to 470 MB. 3. Steps of the whole model, with ceilings of the same run.
within exchange_bench 60 "$(program exchange_bench)" --ranks "$ranks" && show exchange_bench '^[^{]'
steps=(--prefill 8192,16384,32768 --decode 1,4,16,64,256) cache=262144 repeats=5
if [ -n "$dry" ]; then steps=(--prefill 16384 --decode 1,16,256) cache=65536 repeats=2; fi
node=("$(program rank_bench)" --ranks "$ranks" --layers "$layers" --cache $cache --repeats $repeats)
carriers=$(IFS=,; echo "${comms[*]}")
within node 150 "${node[@]}" "${steps[@]}" --exchange "none,$carriers" && show node '^(ceilings|memory|[0-9]+ ranks|prefill|decode|--exchange)'

# 4. Jobs of 500 samples, states of four boundaries: into memory with a reader beside it, onto the disk.
samples=500
most_tokens=1024
[ -z "$dry" ] || most_tokens=128
disks=${STATETAP_DISK:-/var/tmp} memories=/dev/shm places=(memory disk)
fits() {  # tokens of a sample for which a folder holds the shards and what a reader makes of them
  df --output=avail -B1 "$1" | awk -v samples=$samples -v most=$most_tokens \
    'END { t = int(0.9 * $1 / (2 * samples * 4 * 7168 * 2) / 64) * 64; print t < most ? t : most }'
}
if [ "$(fits $memories)" -eq 0 ]; then
  skip "jobs into memory: $memories has no room"
  memories=$disks places=(disk)
fi
tokens=$(printf '%s\n' "$(fits "$memories")" "$(fits "$disks")" | sort -n | head -n 1)
[ "$tokens" -eq $most_tokens ] || skip "samples of $most_tokens tokens in jobs: $memories and $disks have room for $tokens"
taps=2,30,58
[ "$layers" -eq 61 ] || taps=$((layers - 3)),$((layers - 2)),$((layers - 1))
batch=16384
memory=$(mktemp -d "$memories/statetap-XXXXXX") disk=$(mktemp -d "$disks/statetap-XXXXXX") server=
end() { [ -z "$server" ] || { kill "$server" 2>/dev/null; wait "$server"; } 2>/dev/null; server=; }
trap 'end; rm -rf "$memory" "$disk"' EXIT
begin() {  # PROGRAM FLAGS…: a server that is ready within a minute
  local name=$1
  shift
  : >"$disk/ready"
  "$(program "$name")" --data "$disk/data" --listen 127.0.0.1:0 --http "" "$@" >"$disk/ready" 2>"$log/$name.log" &
  server=$!
  for _ in $(seq 600); do
    STATETAP_SERVER=$(sed -n 's/.* grpc=\([^: ]*:[0-9]*\).*/\1/p' "$disk/ready")
    [ -z "$STATETAP_SERVER" ] || break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  export STATETAP_SERVER
  [ -n "$STATETAP_SERVER" ] || { echo "$name did not start:"; tail -n 5 "$log/$name.log"; status=1; end; return 1; }
}
field() { sed -n "s/.*\"$2\":\([0-9.]*\).*/\1/p" "$log/$1.log"; }  # of `statetap show --json`
sent() { "$(program statetap)" submit "$@" --wait && "$(program statetap)" show job --json; }
streamed() {  # a reader follows the job to its end
  "$(program statetap)" submit "$@" && "$(program statetap)" stream job --out "$memory/read" && "$(program statetap)" show job --json
}
export -f sent streamed program
export folder memory
forward=0
report() {  # NAME: its rate, and what that is of the forward's alone
  awk -v rate="$(field "$1" tokens_per_second)" -v bytes="$(field "$1" bytes)" -v n="$(field "$1" stored)" -v forward="${forward:-0}" -v name="$1" \
    'BEGIN { printf "    %s: %d samples stored, %.1f GB of shards, %.0f tok/s", name, n, bytes / 1e9, rate
             if (forward > 0) printf ", %.2f of the forward alone", rate / forward
             print "" }'
  [ "$(field "$1" stored)" = "$samples" ] || { echo "    not all were stored"; status=1; }
}
awk -v samples=$samples -v tokens="$tokens" 'BEGIN { srand(7); for (i = 0; i < samples; ++i) {
  printf "{\"id\":\"s%d\",\"input_ids\":[", i; for (t = 0; t < tokens; ++t) printf "%s%d", t ? "," : "", int(rand() * 163000); print "]}" } }' >"$disk/job.jsonl"
within forward 60 "${node[@]}" --prefill $batch --sample "$tokens" --decode "" --exchange peer &&
  forward=$(sed -n 's/^prefill.*with capture.* \([0-9]*\) tok\/s.*/\1/p' "$log/forward.log")
echo "    forward alone, samples of $tokens tokens, $batch a step, with capture: $forward tok/s"
if begin statetapd --model models/tiny-kimi --backend cuda --tp "$ranks"; then
  within chats 40 bash -c 'sent "$@"' _ examples/prompts_64.jsonl --name job && samples=64 forward=0 report chats
  end
fi
flags=(--layers "$layers" --model "$disk/model" --tp "$ranks" --drain-seconds 5 --max-seq-len 2048 --max-batch-tokens $batch --kv-cache-gib 32 --host-buffer-gib 16)
for place in "${places[@]}"; do
  rm -rf "$disk/data"
  begin random_server "${flags[@]}" --shards "${!place}/shards" || continue
  show random_server 'warmed up'
  what=sent
  [ "$place" != "${places[0]}" ] || what=streamed
  within "job-$place" 110 bash -c "$what"' "$@"' _ "$disk/job.jsonl" --name job --mode prefill --taps $taps && report "job-$place"
  show "job-$place" ' GB/s into| MB/s into'
  end
  rm -rf "${!place:?}/shards" "$memory/read"
done

if [ "$layers" -eq 61 ]; then   # 63.5 GFLOP a token: bench/README.md
  awk '/^ceilings/ { for (i = 1; i < NF; ++i) if ($(i + 1) == "sustained;") tf = $i }
    /^prefill/ && / (peer|nccl) / { for (i = 1; i < NF; ++i) if ($(i + 1) ~ /^tok\/s/) printf "    %s tokens%s by %s: %.2f of eight GPUs'"'"' sustained bf16 rate\n", $2, / with capture/ ? " with capture" : "", / peer / ? "peer" : "nccl", $i * 63.5e9 / (8 * tf * 1e12) }' "$log/node.log"
fi
for line in "${left_out[@]}"; do echo "left out: $line"; done
echo "exit $status after $SECONDS s"
exit $status
