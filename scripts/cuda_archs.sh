#!/bin/bash
# Compiles every kernel for every architecture that we support and fails on spills (above three words) or on wgmma that ptxas had to serialise.
# Needs the CUDA compiler, no GPU.
#   scripts/cuda_archs.sh [ARCH…]      default: 80 90a 100 120
set -uo pipefail
cd "$(dirname "$0")/.."
archs=("$@")
[ $# -gt 0 ] || archs=(80 90a 100 120)
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export nvcc out

compile() {  # source, architecture
  local log registers bad
  log=$out/$(echo "$1" | tr / _)-$2
  if ! "$nvcc" -std=c++20 -O3 -I. --expt-relaxed-constexpr -cubin -gencode="arch=compute_$2,code=sm_$2" -Xptxas -v "$1" -o "$log.cubin" >"$log" 2>&1; then
    cat "$log"
    return 1
  fi
  rm -f "$log.cubin"
  registers=$(grep -oE 'Used [0-9]+ registers' "$log" | grep -oE '[0-9]+' | sort -n | tail -1)
  printf '%-55s sm_%-4s %4s registers at most\n' "$1" "$2" "$registers"
  bad=$(grep -E '(1[3-9]|[2-9][0-9]|[0-9]{3,}) bytes spill|serialized|C75[0-9]{2}' "$log" | sort -u)
  [ -z "$bad" ] || { echo "  $bad"; return 1; }
}
export -f compile

jobs=()
while read -r source; do
  for arch in "${archs[@]}"; do
    case $source in */sm90/*) [ "$arch" = 90a ] || continue ;; esac
    jobs+=("$source" "$arch")
  done
done < <(git ls-files 'extractor/*.cu')
[ ${#jobs[@]} -gt 0 ] || { echo "no kernels"; exit 1; }
printf '%s\n' "${jobs[@]}" | xargs -n 2 -P "$(nproc)" bash -c 'compile "$0" "$1"'
