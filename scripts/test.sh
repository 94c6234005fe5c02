#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test that needs no GPU. Arguments go to ctest (-R name, -L unit, …).
source "$(dirname "$0")/common.sh"
"$root/scripts/setup.sh" --tests
"$root/scripts/build.sh"
say "testing (what needs a GPU is left out; scripts/gpu_check.sh runs it)"
cd "$root/build"
exec ctest --output-on-failure --no-tests=error -LE gpu -j "$(nproc)" "$@"
