#!/bin/sh
# The demo of `make demo` (docs/demo.md): trains three small models on the King James Bible, measures them on held-out
# books to four times the training length, and writes runs/demo/report.html. Resumes where it was stopped.
#
# usage: tools/demo.sh FOX        FOX: the built command
set -eu
fox=$1
cd "$(dirname "$0")/.."
out=runs/demo
models="fox_pro transformer_llama transformer_pro"

tools/make_demo_corpus.sh $out/corpus

for model in $models; do
  "$fox" train configs/demo/$model.toml
done
runs=
for model in $models; do runs="$runs $out/$model"; done
# shellcheck disable=SC2086  # one word a run
"$fox" eval run $runs --data $out/corpus/test --first-word --max-tokens 20000 --prompt "1Sm1:1 " "Luke24:53 "
# shellcheck disable=SC2086
"$fox" report $runs --out $out/report.html \
  --title "A Forgetting Transformer beyond its training length" --notes configs/demo/notes.txt
echo "open $out/report.html"
