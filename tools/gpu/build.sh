#!/usr/bin/env bash
# Builds the CUDA kernels alone, without torch, into build-cuda/libfox_kernels.so, for tools/gpu/*.py.
# usage: [BUILD=folder] tools/gpu/build.sh [name-filter]     only sources whose name matches are recompiled
# Recompiles what is older than a file it includes; fails if the compiler serialises WGMMA (C7510 and its kin).
set -euo pipefail
cd "$(dirname "$0")/../.."
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
out=${BUILD:-build-cuda}
mkdir -p "$out"
up_to_date() {  # object, list of what it was made from
  [[ -f $1 && -f $2 ]] || return 1
  local file
  for file in $(sed -E 's/^[^:]*://; s/\\$//' "$2" | tr ' ' '\n' | grep '^src/'); do [[ $1 -nt $file ]] || return 1; done
}
objects=()
for source in src/kernels/cuda/*.cu; do
  name=$(basename "$source" .cu)
  object=$out/$name.o
  if [[ ! $name =~ ${1:-.} ]]; then
    [[ -f $object ]] && objects+=("$object")
    continue
  fi
  objects+=("$object")
  up_to_date "$object" "$out/$name.d" && continue
  arch="-gencode=arch=compute_90,code=sm_90"
  [[ $name == *_sm90* ]] && arch="-gencode=arch=compute_90a,code=sm_90a"
  nice "$nvcc" $arch -std=c++20 -O3 -Isrc -Xcompiler -fPIC,-Wall -Xptxas -v \
    -MMD -MF "$out/$name.d" -c "$source" -o "$object.tmp" > "$out/$name.log" 2>&1 || { cat "$out/$name.log"; exit 1; }
  if grep -E 'C75(1|2)[0-9]' "$out/$name.log"; then echo "$name: WGMMA is serialised" >&2; exit 1; fi
  mv "$object.tmp" "$object"
  echo "$name: $(grep -c 'Compiling entry' "$out/$name.log") kernels, spills: $(grep -oE '[0-9]+ bytes spill stores' "$out/$name.log" | sort -u | tr '\n' ' ')"
done
nice "$nvcc" -shared -Xlinker --no-undefined -o "$out/libfox_kernels.so.tmp" "${objects[@]}"
mv "$out/libfox_kernels.so.tmp" "$out/libfox_kernels.so"
ls -l "$out/libfox_kernels.so"
