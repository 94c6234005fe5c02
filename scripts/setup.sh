#!/usr/bin/env bash
# Installs what is missing to build, demo and test Statetap on Debian 12 or Ubuntu 24.04. Safe to run again; does nothing when all is there.
#   scripts/setup.sh            packages of the distribution (with sudo where needed)
#   scripts/setup.sh --tests    and, for the tests, a Python environment in .venv
#   scripts/setup.sh --trainers and one in .venv-trainers with torch and the trainers' packages (3 GB, minutes): without it the tests
#                               that need them are skipped
#   scripts/setup.sh --evals    and one in .venv-evals with the OpenAI client and lm-eval, for the tests of the HTTP completions
source "$(dirname "$0")/common.sh"

packages=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libhdf5-dev libsqlite3-dev libcli11-dev nlohmann-json3-dev libfmt-dev
  libzstd-dev zlib1g-dev libxxhash-dev libpcre2-dev libcpp-httplib-dev libssl-dev
)
case ${1:-} in --tests | --trainers | --evals) tests=1 ;; *) tests= ;; esac
if [ "$tests" ]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev hdf5-tools python3 python3-venv clang-format)
fi

command -v apt-get >/dev/null || die "this script knows Debian and Ubuntu only; install by hand: ${packages[*]}"
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing: ${missing[*]}"
  sudo=(); [ "$(id -u)" = 0 ] || sudo=(sudo)
  [ ${#sudo[@]} = 0 ] || command -v sudo >/dev/null || die "not root and no sudo; install as root: apt-get install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "$tests" ]; then
  python=$root/.venv/bin/python3
  if ! "$python" -c 'import h5py, grpc, grpc_tools, grpc_health, mypy, numpy, pyarrow, setuptools, tiktoken' 2>/dev/null; then
    say "making .venv (numpy, h5py, grpcio, pyarrow, tiktoken, mypy)"
    python3 -m venv "$root/.venv"
    "$python" -m pip install -q --disable-pip-version-check numpy h5py grpcio grpcio-tools grpcio-health-checking protobuf pyarrow 'setuptools>=70.1' tiktoken \
      mypy types-grpcio types-protobuf
  fi
fi
if [ "${1:-}" = --trainers ] && ! "$root/.venv-trainers/bin/python3" -c 'import speculators, h5py, grpc, grpc_tools, mypy' 2>/dev/null; then
  say "making .venv-trainers (torch, speculators, specforge, nvidia-modelopt, angelslim)"
  python3 -m venv "$root/.venv-trainers"
  "$root/.venv-trainers/bin/python3" -m pip install -q --disable-pip-version-check 'speculators==0.9.0' pytest h5py grpcio-tools 'setuptools>=77' \
    mypy types-grpcio types-protobuf
  # Their readers alone: they pin a torch or transformers of their own, and need little of what they ask for.
  "$root/.venv-trainers/bin/python3" -m pip install -q --disable-pip-version-check --no-deps specforge==0.2.0 nvidia-modelopt==0.47.0 angelslim==0.5.0
  "$root/.venv-trainers/bin/python3" -m pip install -q --disable-pip-version-check scipy requests omegaconf nvidia-ml-py 'pulp<4'
  "$root/.venv-trainers/bin/python3" -m pip install -q --disable-pip-version-check "$root/client/python[all]"
fi
if [ "${1:-}" = --evals ] && ! "$root/.venv-evals/bin/python3" -c 'import openai, lm_eval, h5py, grpc, grpc_tools' 2>/dev/null; then
  say "making .venv-evals (openai, lm-eval)"
  python3 -m venv "$root/.venv-evals"
  "$root/.venv-evals/bin/python3" -m pip install -q --disable-pip-version-check openai 'lm-eval[api]==0.4.13' numpy h5py grpcio grpcio-tools \
    grpcio-health-checking pyarrow 'setuptools>=70.1'
fi
