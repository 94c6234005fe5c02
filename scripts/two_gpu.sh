#!/bin/bash
# What needs two GPUs, in less than ten minutes: rows between ranks by either carrier, compared bit for bit; the model on two ranks over each;
# a rank that stops; what exchanges cost beside NCCL's own. With one GPU the ranks share it and NCCL is skipped aloud: a dry run.
#   scripts/two_gpu.sh            builds first, into build-gpu/
#   scripts/two_gpu.sh FOLDER     runs the programs that lie in FOLDER, with FOLDER/lib in the library path
# STATETAP_EXCHANGES=N: random exchanges a carrier [500]. STATETAP_MID=FOLDER: the checkpoint of tests/reference/make.sh mid, made if missing.
set -uo pipefail
cd "$(dirname "$0")/.."
programs=(cuda_group_test cuda_reference_test cuda_engine_test)
if [ $# -gt 0 ]; then
  folder=$1 bench=$1/exchange_bench
  export STATETAP_SOURCE_DIR=$PWD LD_LIBRARY_PATH=$folder/lib:${LD_LIBRARY_PATH:-}
else
  cmake --preset gpu >/dev/null && ninja -C build-gpu "${programs[@]}" exchange_bench >&2 || exit 1
  folder=build-gpu/tests bench=build-gpu/bin/exchange_bench
fi
if ldd "$folder/${programs[0]}" | grep -q 'libcublasLt.*not found'; then   # PyTorch's own copies of the CUDA libraries serve
  LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$(python3 -c 'import glob, os, torch
root = os.path.dirname(os.path.dirname(torch.__file__))
print(":".join(sorted({os.path.dirname(p) for p in glob.glob(root + "/nvidia/**/lib/*.so*", recursive=True)})))')
  export LD_LIBRARY_PATH
fi
export NCCL_NVLS_ENABLE=0   # multicast can put the GPUs of a shared host out of service
log=${OUT:-$(mktemp -d)}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || { echo "no GPU here: nothing was tested"; exit 1; }
status=0
run() {  # name, seconds, command…
  local name=$1 limit=$2 start seconds code
  shift 2
  start=$(date +%s.%N)
  timeout "$limit" "$@" >"$log/$name.log" 2>&1
  code=$?
  seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  printf '%-28s exit %3d  %6s s   %s passed, %s failed, %s skipped\n' "$name" $code "$seconds" \
    "$(grep -cE '^\[ +OK \].*ms\)$' "$log/$name.log")" "$(grep -cE '^\[ +FAILED \].*ms\)$' "$log/$name.log")" "$(grep -cE '^\[ +SKIPPED \].*ms\)$' "$log/$name.log")"
  grep -hE 'ranks over|ranks: |200 jobs' "$log/$name.log" | grep -v '^\[' | sed 's/^/    /'
  [ $code -eq 0 ] || { status=1; grep -B2 -A12 -E 'Failure$|terminate|error' "$log/$name.log" | head -40; }
}
export STATETAP_EXCHANGES=${STATETAP_EXCHANGES:-500}
export STATETAP_MID=${STATETAP_MID:-$log/mid}
run exchanges 300 "$folder/cuda_group_test" --gtest_color=no
run exchange_bench 120 "$bench"
grep -v '^{' "$log/exchange_bench.log"
if [ ! -e "$STATETAP_MID/reference.safetensors" ]; then
  if python3 -c 'import torch, transformers, safetensors' 2>/dev/null; then
    DEVICE=cuda run mid 120 tests/reference/make.sh mid "$STATETAP_MID"
  else
    echo "mid: python3 has no torch, transformers and safetensors: not tested"
    unset STATETAP_MID
  fi
fi
of() { local filter= test; for test in "${@:2}"; do filter+="$1/$test:"; done; echo "${filter%:}"; }   # the cases with two ranks
for comm in peer nccl; do
  export STATETAP_COMM=$comm
  run "model-$comm" 150 "$folder/cuda_reference_test" --gtest_color=no --gtest_filter="$(of '*Ranks*' 4 5 6 7):$(of '*Mid*' 4 5 6 7)"
  run "engine-$comm" 150 "$folder/cuda_engine_test" --gtest_color=no --gtest_filter="$(of '*Greedy*' 2 3):*Bits*:*Comm*:*Fault*"
done
unset STATETAP_COMM
rm -rf "${log:?}/mid"
exit $status
