#!/usr/bin/env bash
# Configures and builds into build/ (Release); programs land in build/bin/.
#   scripts/build.sh               everything: programs, tests, benches, CUDA where a toolkit is found
#   scripts/build.sh --programs    only statetapd and statetap
#   scripts/build.sh --cpu-only    without CUDA
source "$(dirname "$0")/common.sh"

cpu_only=OFF tests=ON targets=()   # every choice is written to the cache: the last call counts
for argument in "$@"; do
  case $argument in
    --programs) tests=OFF; targets=(statetapd statetap) ;;
    --cpu-only) cpu_only=ON ;;
    *) die "unknown option $argument; known: --programs, --cpu-only" ;;
  esac
done
cd "$root"
cmake --preset release "-DSTATETAP_CPU_ONLY=$cpu_only" "-DSTATETAP_BUILD_TESTS=$tests" "-DSTATETAP_BUILD_BENCH=$tests" >&2
# A compiler of a large file takes 1–2 GB: no more jobs than memory allows.
memory_gb=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
jobs=$(nproc); [ "$jobs" -le $((memory_gb / 2 + 1)) ] || jobs=$((memory_gb / 2 + 1))
ninja -C build -j "$jobs" "${targets[@]}" >&2
