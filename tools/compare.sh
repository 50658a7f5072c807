#!/bin/sh
# The comparison of `make compare` (docs/demo.md): trains the nine systems of the paper at equal size on the King James
# Bible, the three of the demo among them, measures their loss token by token to four times the training length, and
# writes runs/demo/compare.html. Resumes where it was stopped.
#
# usage: tools/compare.sh FOX        FOX: the built command
set -eu
fox=$1
cd "$(dirname "$0")/.."
out=runs/demo
models="fox_pro fox_llama transformer_pro transformer_llama transformer_swa mamba2 hgrn2 delta_net samba"

tools/make_demo_corpus.sh $out/corpus

for model in $models; do
  "$fox" train configs/demo/$model.toml
done
runs=
for model in $models; do runs="$runs $out/$model"; done
# shellcheck disable=SC2086  # one word a run
"$fox" eval run $runs --data $out/corpus/test --first-word --max-tokens 20000 --prompt "1Sm1:1 " "Luke24:53 "
# shellcheck disable=SC2086
"$fox" report $runs --out $out/compare.html \
  --title "Nine systems at equal size, to four times their training length" --notes configs/demo/compare_notes.txt
echo "open $out/compare.html"
