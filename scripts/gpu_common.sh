# Sourced by the scripts that run programs on GPUs: where the programs are, and one part of a run at a time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# programs FOLDER NAME…: they lie in FOLDER, with FOLDER/lib in the library path; where it is empty they are built into build-gpu/.
programs() {
  folder=$1
  shift
  if [ -n "$folder" ]; then
    export STATETAP_SOURCE_DIR=$PWD LD_LIBRARY_PATH=$folder/lib:${LD_LIBRARY_PATH:-}
  else
    cmake --preset gpu >/dev/null && ninja -C build-gpu "$@" >&2 || exit 1
  fi
  if ldd "$(program "$1")" 2>/dev/null | grep -q 'libcublasLt.*not found'; then   # PyTorch's own copies of the CUDA libraries serve
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$(env -u LD_LIBRARY_PATH python3 -c 'import glob, os, torch
root = os.path.dirname(os.path.dirname(torch.__file__))
print(":".join(sorted({os.path.dirname(p) for p in glob.glob(root + "/nvidia/**/lib/*.so*", recursive=True)})))')
    export LD_LIBRARY_PATH
  fi
}
program() {  # the path of one
  if [ -n "$folder" ]; then echo "$folder/$1"; elif [ -x "build-gpu/tests/$1" ]; then echo "build-gpu/tests/$1"; else echo "build-gpu/bin/$1"; fi
}

# run NAME SECONDS COMMAND…: into $log/NAME.log, for so long at most; a row of the table. $status becomes 1 where it fails.
status=0
run() {
  local name=$1 limit=$2 start seconds code
  shift 2
  start=$(date +%s.%N)
  timeout -k 5 "$limit" "$@" >"$log/$name.log" 2>&1
  code=$?
  seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  printf '%-28s exit %3d  %6s s' "$name" $code "$seconds"
  if grep -q '^\[==========\]' "$log/$name.log"; then
    count() { grep -cE "^\[ +$1 \].*ms\)$" "$log/$name.log"; }
    printf '   %s passed, %s failed, %s skipped' "$(count OK)" "$(count FAILED)" "$(count SKIPPED)"
    [ "$(count OK)" -gt 0 ] || code=1   # nothing was tested
  fi
  echo
  grep -hE 'ranks over|ranks: |200 jobs' "$log/$name.log" | grep -v '^\[' | sed 's/^/    /'
  [ $code -eq 0 ] && return
  status=1
  grep -B2 -A12 -E 'Failure$|terminate|error' "$log/$name.log" | head -40 | grep . || tail -n 5 "$log/$name.log"
  return "$code"
}
# of SUITE CASE…: a filter of the cases with these numbers.
of() { local filter= test; for test in "${@:2}"; do filter+="$1/$test:"; done; echo "${filter%:}"; }
