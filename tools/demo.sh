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
for model in $models; do
  "$fox" eval loss $out/$model --data $out/corpus/test --length 1024 --stride 32 --max-tokens 20000 --first-word
  "$fox" gates $out/$model --data $out/corpus/test --length 1024
done
"$fox" report $(for model in $models; do echo $out/$model; done) --out $out/report.html \
  --title "A Forgetting Transformer beyond its training length" --notes configs/demo/notes.txt
echo "open $out/report.html"
