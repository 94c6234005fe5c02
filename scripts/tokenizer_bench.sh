#!/usr/bin/env bash
# The tokenizer beside tiktoken, in the same run (bench/tokenizer_peer.py says which texts). Builds the bench and makes a Python environment
# for tiktoken in build/ where they are missing. Options: --rounds N, --bytes N.
source "$(dirname "$0")/common.sh"
[ -x "$root/build/bin/tokenizer_bench" ] || "$root/scripts/build.sh" >&2
python=$root/build/bench-venv/bin/python3
if ! "$python" -c 'import tiktoken' 2>/dev/null; then
  say "making build/bench-venv (tiktoken)"
  python3 -m venv "$root/build/bench-venv"
  "$python" -m pip install -q --disable-pip-version-check tiktoken
fi
exec "$python" "$root/bench/tokenizer_peer.py" "$@"
