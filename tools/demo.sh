#!/bin/sh
# The demo of `make demo` and the comparison of `make compare` (docs/demo.md): trains small models on the King James
# Bible, measures them token by token on held-out books to four times the training length, and writes a page to
# runs/demo. Resumes where it was stopped; the models of the demo are among those compared.
#
# usage: tools/demo.sh FOX [demo|compare]        FOX: the built command; demo: three models, compare: the paper's nine
set -eu
fox=$1
cd "$(dirname "$0")/.."
out=runs/demo
case ${2:-demo} in
  demo)
    models="fox_pro transformer_llama transformer_pro"
    page=report.html notes=notes.txt title="A Forgetting Transformer beyond its training length" ;;
  compare)
    models="fox_pro fox_llama transformer_pro transformer_llama transformer_swa mamba2 hgrn2 delta_net samba"
    page=compare.html notes=compare_notes.txt title="Nine systems at equal size, to four times their training length" ;;
  *)
    echo "error: tools/demo.sh: there is no '$2'" >&2
    echo "hint: name demo or compare" >&2
    exit 1 ;;
esac

tools/make_demo_corpus.sh $out/corpus

for model in $models; do
  "$fox" train configs/demo/$model.toml
done
runs=
for model in $models; do runs="$runs $out/$model"; done
# shellcheck disable=SC2086  # one word a run
"$fox" eval run $runs --data $out/corpus/test --first-word --max-tokens 20000 --prompt "1Sm1:1 " "Luke24:53 "
# shellcheck disable=SC2086
"$fox" report $runs --out $out/$page --title "$title" --notes configs/demo/$notes
echo "open $out/$page"
