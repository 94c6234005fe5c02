# Sourced by the other scripts: the repository's root, and words on stderr.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf '\033[1m%s\033[0m\n' "== $*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
