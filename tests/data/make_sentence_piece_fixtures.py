#!/usr/bin/env python3
"""Writes tests/data/sentence_piece/: two small models and what the sentencepiece package makes of texts and ids.

Usage: make_sentence_piece_fixtures.py (needs requirements-test.txt)
"""
import json
import pathlib
import tempfile

import sentencepiece

import sentence_piece_peers

FOLDER = pathlib.Path(__file__).resolve().parent / "sentence_piece"
# What becomes what: full-width letters, a ring over A, white space, and a soft hyphen that goes away.
RULES = "FF21\t41\nFF22\t42\n0041 030A\tC5\n0009\t20\n000A\t20\n00A0\t20\nAD\t\n2026\t2E 2E 2E\n"
TEXTS = ["", " ", "a", " a ", "Hello  world", "In the beginning God created the heaven and the earth.", "the gates of each head, trained at 16,384 tokens",
         "tabs\tand\nlines\n\n", "Ａ Ｂ A\u030a soft\u00adhyphen and so on…", "☃", "☃☃ ☃ x☃y", "é 中文 😀👩‍👩‍👧", "a\u2581b \u2581 c", "<s>a</s> <unk> <0x41>",
         "<sep>", "fox<sep>foxes", "1234 5.6", "   three   spaces   ", "\u0000 zero", "x" * 300]
DAMAGED = [b"\xff", b"a\xc3", b"\xe2\x96 \x81", b"\xf0\x9f\x98 x", b"\x80\xed\xa0\x80b"]


def main():
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "rules.tsv").write_text(RULES, encoding="utf-8")
        unigram = sentence_piece_peers.train(folder, "unigram_bytes", byte_fallback=False, vocab_size=400, normalization_rule_name="",
                                             normalization_rule_tsv=str(folder / "rules.tsv"), user_defined_symbols=["<sep>", "fox"])
        for path, kind in ((sentence_piece_peers.train(folder, "llama", vocab_size=500), "bpe"), (unigram, "unigram")):
            (FOLDER / f"{kind}.model").write_bytes(path.read_bytes())
    fixtures = {}
    for kind in ("bpe", "unigram"):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / f"{kind}.model"))
        texts = [text.encode("utf-8") for text in TEXTS] + DAMAGED
        id_lists = [[], [processor.bos_id()], *([i] for i in range(0, processor.get_piece_size(), 9)), *sentence_piece_peers.random_ids(processor, 60, 1)]
        # Bytes that spell no character are U+FFFD here, but as they are in fox: left to the peer test.
        fixtures[kind] = {
            "vocab_size": processor.get_piece_size(), "bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id(),
            "encoded": [{"text": text.hex(), "ids": processor.encode(text)} for text in texts],
            "decoded": [{"ids": ids, "text": processor.decode(ids)} for ids in id_lists if "\ufffd" not in processor.decode(ids)]}
    text = json.dumps(fixtures, ensure_ascii=False).replace("}, {", "},\n{")
    (FOLDER / "fixtures.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
