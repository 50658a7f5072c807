#!/bin/sh
# GPU tests of an installed build, offline: the operators' CUDA sides against their CPU sides, the attention kernels
# against float64, those for SM80 too. Says how many cases ran and writes JSON.
#
# usage: tools/gpu_tests.sh [--quick] [BUILD [OUT]]
#        BUILD (default build) holds libfox.so and libfox_cuda.so; python3 has torch; OUT (default results) gets the JSON
set -eu
cd "$(dirname "$0")/.."
quick=
if [ "${1:-}" = --quick ]; then quick=--quick; shift; fi
build=$(cd "${1:-build}" && pwd)
out=${2:-results}
mkdir -p "$out"
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
# The build's own rpath names the machine it was built on.
LD_LIBRARY_PATH="$build:$build/lib:$torch/lib:$(echo "$torch"/../nvidia/*/lib | tr ' ' ':')"
FOX_KERNELS="$build/libfox_cuda.so"
export LD_LIBRARY_PATH FOX_KERNELS
failed=0
python3 tools/gpu/check_ops.py "$build" --out "$out" || failed=1
# shellcheck disable=SC2086
python3 tools/gpu/check_recurrences.py "$build" $quick --out "$out" || failed=1
python3 tools/gpu/check_attention_ops.py "$build" --out "$out/attention_ops_check_gpu.json" || failed=1
# shellcheck disable=SC2086  # an option or nothing
python3 tools/gpu/check_forward.py $quick --out "$out/forward_check_gpu.json" || failed=1
python3 tools/gpu/check_backward.py $quick --forward --library "$FOX_KERNELS" --out "$out/backward_check_gpu.json" || failed=1
# shellcheck disable=SC2086
python3 tools/gpu/check_forward.py $quick --sm80 --out "$out/forward_check_sm80.json" || failed=1
python3 tools/gpu/check_backward.py $quick --sm80 --forward --library "$FOX_KERNELS" --out "$out/backward_check_sm80.json" || failed=1
python3 tools/gpu/decode.py --check || failed=1
exit $failed
