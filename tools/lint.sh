#!/bin/sh
# Formatting, layers and clang-tidy. usage: tools/lint.sh [BUILD [ROOM…]]   (BUILD as `make lint` configures it)
# clang-tidy reads what the compiler compiles, most rooms eight files at a time (cmake/rooms.cmake): torch's headers
# alone cost it half a minute. In such files the analyzer follows no paths; configured with -DFOX_TOGETHER=OFF it does.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build-lint}
[ $# -eq 0 ] || shift
rooms=$(echo "${*:-base config dist ops nn mixers model data checkpoint infer eval train report bench cli}" | tr ' ' '|')
git ls-files -z 'src/*.h' 'src/*.cpp' 'src/*.cu' 'src/*.cuh' 'tests/*.h' 'tests/*.cpp' |
  xargs -0 clang-format --dry-run --Werror
python3 tools/check_layers.py
sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' "$build/compile_commands.json" |
  grep -E "/src/($rooms)/|/(room|fox)_($rooms)\.dir/Unity/" |
  xargs -d '\n' -n 1 -P "$(nproc)" clang-tidy -p "$build" --quiet --warnings-as-errors='*'
echo "lint: clean"
