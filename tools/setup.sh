#!/bin/sh
# Installs what building, testing and the demo need: Debian packages (tools/apt-packages.txt) and a virtual environment
# in .venv (requirements*.txt). Does nothing when all is there. Without root it prints the one command an administrator
# must run, and stops.
#
# usage: tools/setup.sh [--test]        --test also installs the peers that tests compare with
set -eu
cd "$(dirname "$0")/.."

missing=
for package in $(grep -v '^#' tools/apt-packages.txt) ${FOX_EXTRA_PACKAGES:-}; do
  dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
if [ -n "$missing" ]; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "error: missing system packages:$missing" >&2
    echo "hint: an administrator must run: apt-get update && apt-get install -y --no-install-recommends$missing" >&2
    exit 1
  fi
  echo "setup: installing$missing"
  apt-get update -qq
  # shellcheck disable=SC2086  # one word a package
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

# A run of an older setup, or one that was cut short, is repaired: the stamp is written last.
if command -v nvcc >/dev/null 2>&1 || [ -x /usr/local/cuda/bin/nvcc ]; then torch=full; else torch=lean; fi
wanted="$torch $(cat requirements.txt requirements-torch.txt | cksum)"
if [ "$(cat .venv/.fox-setup 2>/dev/null || true)" != "$wanted" ]; then
  echo "setup: virtual environment .venv ($torch libtorch; a few minutes the first time)"
  [ -x .venv/bin/pip ] || python3 -m venv .venv
  pip=".venv/bin/pip --quiet --disable-pip-version-check install"
  $pip -r requirements.txt
  if [ "$torch" = full ]; then $pip -r requirements-torch.txt; else $pip --no-deps -r requirements-torch.txt; fi
  echo "$wanted" > .venv/.fox-setup
fi
if [ "${1:-}" = --test ]; then
  wanted=$(cksum < requirements-test.txt)
  if [ "$(cat .venv/.fox-setup-test 2>/dev/null || true)" != "$wanted" ]; then
    .venv/bin/pip --quiet --disable-pip-version-check install -r requirements-test.txt
    echo "$wanted" > .venv/.fox-setup-test
  fi
fi
