#!/bin/sh
# Formatting, layers and clang-tidy. usage: tools/lint.sh [BUILD [ROOM…]]   (BUILD as `make lint` configures it)
# clang-tidy reads the rooms named, by default those without torch headers: a file with them costs it half a minute.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build-lint}
[ $# -eq 0 ] || shift
rooms=${*:-base config report}
git ls-files -z 'src/*.h' 'src/*.cpp' 'src/*.cu' 'src/*.cuh' 'tests/*.h' 'tests/*.cpp' |
  xargs -0 clang-format --dry-run --Werror
python3 tools/check_layers.py
# shellcheck disable=SC2046,SC2086  # one word a room
git ls-files -z -- $(printf 'src/%s/*.cpp ' $rooms) | xargs -0 -n 1 -P "$(nproc)" clang-tidy -p "$build" --quiet --warnings-as-errors='*'
echo "lint: clean"
