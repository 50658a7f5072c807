#!/bin/sh
# Writes a corpus of long documents, the larger C files of Linux (Debian package linux-source-6.1, GPL-2):
# DIR/train.jsonl.zst, one file a document, in an order that has nothing to do with their places in the tree, and
# DIR/valid.jsonl.zst, 16 files of 192 KiB and more. The same bytes each time. Does nothing when DIR is there already.
#
# usage: tools/make_long_corpus.sh DIR [MB]      MB (default 170): text to train on, in millions of bytes
set -eu
package=linux-source-6.1
version=6.1.192-3
shortest=48k     # a document is longer: some 23,000 tokens of GPT-2
held_out=16      # documents
longest=196608   # bytes that a held-out one has at least

fail() {
  echo "error: $1" >&2
  echo "hint: $2" >&2
  exit 1
}
[ $# -eq 1 ] || [ $# -eq 2 ] || fail "no folder to write to" "usage: tools/make_long_corpus.sh DIR [MB]"
dir=${1%/}
[ ! -e "$dir" ] || exit 0
for command in apt-get dpkg-deb xz zstd jq; do
  command -v $command >/dev/null 2>&1 || fail "the command $command is missing" "apt-get install apt dpkg xz-utils zstd jq"
done
mb=${2:-170}

# Built beside and renamed, so that a run that was cut short is not taken for a corpus.
rm -rf "$dir.new"
mkdir -p "$dir.new/unpacked"
new=$(cd "$dir.new" && pwd)
(cd "$new/unpacked" && apt-get -q -o APT::Sandbox::User=root download $package=$version) ||
  fail "apt-get has no $package $version" "apt-get update; versions that are gone are at snapshot.debian.org, and another one is another corpus"
dpkg-deb --extract "$new/unpacked/"*.deb "$new/unpacked"
tar -xJf "$new/unpacked/usr/src/$package.tar.xz" -C "$new/unpacked"
cd "$new/unpacked/$package"

# What is mostly numbers (tables of registers, of characters) is left out. Sums of the contents give an order that has
# nothing to do with names, and documents that are there twice stand together.
find . -name '*.c' -size +$shortest -exec awk '
  FNR == 1 { if (file && 4 * numbers < lines) print file; file = FILENAME; lines = numbers = 0 }
  { ++lines; if (/0x/) ++numbers }
  END { if (4 * numbers < lines) print file }' {} + |
  LC_ALL=C sort | xargs md5sum | LC_ALL=C sort | awk '$1 != last { print $2 } { last = $1 }' |
  xargs stat -c '%s %n' > "$new/order"
awk -v longest=$longest -v held_out=$held_out -v bytes="${mb}000000" -v dir="$new" '
  $1 >= longest && taken < held_out { ++taken; print $2 > (dir "/valid.files"); next }
  (total += $1) <= bytes { print $2 > (dir "/train.files") }
' "$new/order"

for part in train valid; do
  # A file between, since of two commands in a pipe the shell only hears of the last.
  xargs -n 1 jq -Rsc '{path: input_filename, text: .}' < "$new/$part.files" > "$new/$part.jsonl"
  zstd -q -19 --long=27 -T0 -o "$new/$part.jsonl.zst" < "$new/$part.jsonl"
  rm "$new/$part.jsonl"
  echo "$part: $(wc -l < "$new/$part.files") documents of $package $version" >&2
done
rm -r "$new/unpacked" "$new/order"
mv "$new" "${new%.new}"
