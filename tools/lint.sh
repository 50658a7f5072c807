#!/bin/sh
# Formatting, layers and clang-tidy. usage: tools/lint.sh [BUILD]   (BUILD holds compile_commands.json)
set -eu
cd "$(dirname "$0")/.."
build=${1:-build}
git ls-files -z 'src/*.h' 'src/*.cpp' 'src/*.cu' 'src/*.cuh' 'tests/*.h' 'tests/*.cpp' |
  xargs -0 clang-format --dry-run --Werror
python3 tools/check_layers.py
git ls-files -z 'src/*.cpp' | xargs -0 -n 1 -P "$(nproc)" clang-tidy -p "$build" --quiet --warnings-as-errors='*'
echo "lint: clean"
