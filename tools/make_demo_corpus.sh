#!/bin/sh
# Writes the King James Bible (Debian package bible-kjv), one text file a book, one verse a line led by its label such as
# 2Ki12:19. DIR/valid holds the books on which the demo's recipe was chosen, DIR/test those on which it reports, and
# DIR/train the other 56. Does nothing when DIR is there already.
#
# usage: tools/make_demo_corpus.sh DIR
set -eu
valid="Ruth 2Ki Prv Mark Rom"
test="Jonah 1Sm Eccl Luke Gal"

fail() {
  echo "error: $1" >&2
  echo "hint: $2" >&2
  exit 1
}
[ $# -eq 1 ] || fail "no folder to write to" "usage: tools/make_demo_corpus.sh DIR"
[ ! -e "$1" ] || exit 0
command -v bible >/dev/null 2>&1 || fail "the command bible is missing" "apt-get install bible-kjv"

# Built beside and renamed, so that a run that was cut short is not taken for a corpus.
new="$1.new"
rm -rf "$new"
mkdir -p "$new/train" "$new/valid" "$new/test"
bible -f gen1:1-rev22:21 > "$new/all"
# The number before the name keeps the books in order.
awk -v dir="$new" -v valid=" $valid " -v test=" $test " '
  match($1, /[0-9]+:[0-9]+$/) {
    book = substr($1, 1, RSTART - 1)
    if (book != last) {
      if (file) close(file)
      part = index(valid, " " book " ") ? "valid" : index(test, " " book " ") ? "test" : "train"
      file = sprintf("%s/%s/%02d-%s.txt", dir, part, ++books, book)
      last = book
    }
    print > file
    next
  }
  { exit 1 }
' "$new/all" || fail "the text of bible is not one verse a line" "install Debian's bible-kjv 4.38"
rm "$new/all"
for part in train:56 valid:5 test:5; do
  found=$(find "$new/${part%:*}" -name '*.txt' | wc -l)
  [ "$found" -eq "${part#*:}" ] || fail "the text of bible has $found ${part%:*} books, not ${part#*:}" "install Debian's bible-kjv 4.38"
done
mv "$new" "$1"
