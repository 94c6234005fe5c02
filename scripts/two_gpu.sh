#!/bin/bash
# What needs two GPUs, in less than ten minutes: rows between ranks by either carrier, compared bit for bit; the model on two ranks over each;
# a rank that stops; what exchanges cost beside NCCL's own. With one GPU the ranks share it and NCCL is skipped aloud: a dry run.
#   scripts/two_gpu.sh            builds first, into build-gpu/
#   scripts/two_gpu.sh FOLDER     runs the programs that lie in FOLDER, with FOLDER/lib in the library path
# STATETAP_EXCHANGES=N: random exchanges a carrier [500]. STATETAP_MID=FOLDER: the checkpoint of tests/reference/make.sh mid, made if missing.
source "$(dirname "$0")/gpu_common.sh"
programs "${1:-}" cuda_group_test cuda_reference_test cuda_engine_test exchange_bench
export NCCL_NVLS_ENABLE=0   # multicast can put the GPUs of a shared host out of service
log=${OUT:-$(mktemp -d)}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || { echo "no GPU here: nothing was tested"; exit 1; }
export STATETAP_EXCHANGES=${STATETAP_EXCHANGES:-500}
export STATETAP_MID=${STATETAP_MID:-$log/mid}
run exchanges 300 "$(program cuda_group_test)" --gtest_color=no
run exchange_bench 120 "$(program exchange_bench)" --ranks 2
grep -v '^{' "$log/exchange_bench.log"
if [ ! -e "$STATETAP_MID/reference.safetensors" ]; then
  if python3 -c 'import torch, transformers, safetensors' 2>/dev/null; then
    DEVICE=cuda run mid 120 tests/reference/make.sh mid "$STATETAP_MID"
  else
    echo "mid: python3 has no torch, transformers and safetensors: not tested"
    unset STATETAP_MID
  fi
fi
# The cases with two ranks.
for comm in peer nccl; do
  export STATETAP_COMM=$comm
  run "model-$comm" 150 "$(program cuda_reference_test)" --gtest_color=no --gtest_filter="$(of '*Ranks*' 4 5 6 7):$(of '*Mid*' 4 5 6 7)"
  run "engine-$comm" 150 "$(program cuda_engine_test)" --gtest_color=no --gtest_filter="$(of '*Greedy*' 2 3):*Bits*:*Comm*:*Fault*"
done
unset STATETAP_COMM
rm -rf "${log:?}/mid"
exit $status
