#!/usr/bin/env bash
# Builds the CUDA kernels alone, without torch, into build-cuda/libfox_kernels.so, for tools/gpu/*.py.
# usage: tools/gpu/build.sh [name-filter]     only sources whose name contains the filter are looked at
# Rebuilds what is older than the headers or itself; fails if the compiler serialises WGMMA (C7510 and its kin).
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
out=build-cuda
mkdir -p "$out"
newest_header=$(ls -t src/kernels/cuda/*.h src/kernels/cuda/*.cuh | head -1)
for source in src/kernels/cuda/*"${1:-}"*.cu; do
  name=$(basename "$source" .cu)
  object=$out/$name.o
  [[ $object -nt $source && $object -nt $newest_header ]] && continue
  nice "$nvcc" -gencode=arch=compute_90a,code=sm_90a -std=c++20 -O3 -Isrc -Xcompiler -fPIC,-Wall -Xptxas -v \
    -c "$source" -o "$object.tmp" > "$out/$name.log" 2>&1 || { cat "$out/$name.log"; exit 1; }
  if grep -E 'C75(1|2)[0-9]' "$out/$name.log"; then echo "$name: WGMMA is serialised" >&2; exit 1; fi
  mv "$object.tmp" "$object"
  echo "$name: $(grep -c 'Compiling entry' "$out/$name.log") kernels, spills: $(grep -oE '[0-9]+ bytes spill stores' "$out/$name.log" | sort -u | tr '\n' ' ')"
done
nice "$nvcc" -shared -o "$out/libfox_kernels.so" "$out"/*.o
ls -l "$out/libfox_kernels.so"
