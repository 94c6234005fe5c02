#!/usr/bin/env bash
# Formats our C++; with --check changes nothing and fails where something would change.
source "$(dirname "$0")/common.sh"
cd "$root"
mapfile -t files < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
[ ${#files[@]} -gt 0 ] || exit 0
if [ "${1:-}" = --check ]; then
  clang-format --dry-run --Werror "${files[@]}" || die "run scripts/format.sh"
else
  clang-format -i "${files[@]}"
fi
