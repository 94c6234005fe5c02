#!/bin/bash
# Compiles every kernel for every architecture that we support and fails on spills of more than a few words or on
# wgmma that ptxas had to serialise. Needs the CUDA compiler, no GPU.
#   scripts/cuda_archs.sh [ARCH…]      default: 80 90a 100 120
set -uo pipefail
cd "$(dirname "$0")/.."
archs=("$@")
[ $# -gt 0 ] || archs=(80 90a 100 120)
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
for source in $(git ls-files 'extractor/*.cu'); do
  for arch in "${archs[@]}"; do
    case $source in */sm90/*) [ "$arch" = 90a ] || continue ;; esac
    log=$out/log
    if ! "$nvcc" -std=c++20 -O3 -I. --expt-relaxed-constexpr -cubin -gencode="arch=compute_$arch,code=sm_$arch" -Xptxas -v \
        "$source" -o "$out/kernel.cubin" >"$log" 2>&1; then
      cat "$log"
      status=1
      continue
    fi
    registers=$(grep -oE 'Used [0-9]+ registers' "$log" | grep -oE '[0-9]+' | sort -n | tail -1)
    bad=$(grep -E '[1-9][0-9]{2,} bytes spill|serialized' "$log" | sort -u)
    printf '%-60s sm_%-4s %4s registers at most\n' "$source" "$arch" "$registers"
    if [ -n "$bad" ]; then
      echo "  $bad"
      status=1
    fi
  done
done
exit $status
