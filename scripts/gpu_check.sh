#!/bin/bash
# Runs every test that needs a GPU and prints one table. Exit 0: all passed on a GPU.
#   scripts/gpu_check.sh            builds first, into build-gpu/
#   scripts/gpu_check.sh FOLDER     runs the test programs that lie in FOLDER, with FOLDER/lib in the library path
source "$(dirname "$0")/gpu_common.sh"
tests=(cuda_kernels_test cuda_ops_test cuda_large_test cuda_group_test cuda_reference_test cuda_engine_test)
programs "${1:-}" "${tests[@]}"
log=${OUT:-$(mktemp -d)}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU here"
printf '%-22s %7s %7s %8s %8s\n' test passed failed skipped seconds
for test in "${tests[@]}"; do
  if [ ! -x "$(program "$test")" ]; then
    printf '%-22s is not in %s: not tested\n' "$test" "$folder"
    status=1
    continue
  fi
  start=$(date +%s.%N)
  timeout 280 "$(program "$test")" --gtest_color=no >"$log/$test.log" 2>&1
  code=$?
  seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  count() { grep -cE "^\[ +$1 \].*\([0-9]+ ms\)$" "$log/$test.log"; }
  printf '%-22s %7d %7d %8d %8s\n' "$test" "$(count OK)" "$(count FAILED)" "$(count SKIPPED)" "$seconds"
  if [ $code -ne 0 ] || [ "$(count OK)" -eq 0 ]; then status=1; fi
  [ $code -eq 0 ] || echo "  exit $code; see $log/$test.log"
done
grep -h "ranks" "$log"/cuda_group_test.log "$log"/cuda_reference_test.log "$log"/cuda_engine_test.log | grep -v '^\['
exit $status
