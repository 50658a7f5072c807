#!/usr/bin/env python3
"""Writes tests/data/tokenizer_fixtures.json: texts and the ids that tiktoken and Hugging Face's tokenizers give them.

Both peers must agree, for GPT-2's whole merge list, for a part of it and for none. They cannot be given bytes that are
not UTF-8; the C++ test looks at those. Usage: make_tokenizer_fixtures.py (needs requirements-test.txt)
"""
import json
import pathlib

import peers

HERE = pathlib.Path(__file__).resolve().parent
MERGES = [50000, 768, 0]

TEXTS = [
    "", "a", " ", "Hello, world!", "Hello world", " Hello", "hello\n",
    # contractions; the pattern knows lower case and the straight apostrophe only
    "I'm you're he's we'll they'd I've don't 's 't 're 've 'm 'll 'd", "I'M DON'T WE'LL", "don’t it’s", "''s'''t 'S'",
    # runs of spaces before words, at the end, alone
    "a  b   c    d", "  lead", "trail  ", "     ", "a     ", "     a", "x = 1;\n    y = 2;\n\n\n    z", "a \n b \n\n c\n \n",
    # tabs and line ends
    "\tone\ttwo\t\tthree", "\t \t x", "line\r\nline\r\n\r\nline\rline", "\r\n", "a\r\n  b", "\v\fpage\v\v",
    # spaces beyond ASCII: the last two are none (U+180E since Unicode 6.3, U+200B never was)
    "a\u00a0b\u00a0\u00a0c", "a\u0085b \u0085 c", "a\u2003\u2003b\u3000c\u2028d\u2029e\u1680f\u202fg\u205fh", "a\u180eb \u180e c", "a\u200bb \u200b",
    # numbers of all kinds
    "1 12 123 1234567 3.14159 -5e10 0x1F", "½ ² Ⅷ ٣٤٥ 一二三 ১২৩", "2Ki12:19 And the rest of the acts",
    # emoji, joiners, flags, skin tones, keycaps
    "😀😀 😀", "👩‍👩‍👧‍👦 family", "👍🏽👍🏿", "🇩🇪🇫🇷", "1️⃣ #️⃣", "❤️‍🔥", "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    # combining marks are neither letter nor number
    "e\u0301 caf\u00e9 cafe\u0301", "a\u0300\u0301\u0302\u0303b", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢", "ก็ไม่ได้", "हिन्दी में", "ﷺ",
    # scripts
    "敏捷的棕色狐狸跳过了懒狗。", "素早い茶色の狐がのろまな犬を飛び越える", "빠른 갈색 여우", "Быстрая лиса", "الثعلب البني", "השועל המהיר", "αβγ ΔΕΖ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀",
    "Straße ß ẞ İstanbul ı ﬁ ŉ",
    # punctuation
    "!!!???...---___***", "a,b;c:d", "(a)[b]{c}<d>", "http://example.com/?q=1&r=2#s", "C:\\path\\to\\file", "\"quoted\" `code` ~tilde~", "…—–«»„“”‘’",
    # control characters and the ends of Unicode
    "\x00\x01\x02\x7f", "a\x00b", "\ufeffBOM", "\ufffd\ufffe\uffff", "\U0010ffff", "\ue000 private",
    # the special token as text
    "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>", "<|endoftext|", " <|endoftext|> ",
    "In the beginning God created the heaven and the earth.\nGen1:2 And the earth was without form, and void;",
    "def f(x):\n\treturn x**2  # square\n",
]
# Too long to list: character, count, what follows.
RUNS = [["a", 100_000, ""], [" ", 100_000, ""], [" ", 100_000, "x"], ["\n", 100_000, ""], ["!", 100_000, ""], ["7", 100_000, ""],
        ["é", 50_000, ""], ["😀", 25_000, ""], ["ab", 50_000, ""]]


def run_summary(ids):
    """A long run's ids as their number, a polynomial hash, and both ends."""
    value = 0
    for i in ids:
        value = (value * 1_000_003 + i) % (1 << 61)
    return {"count": len(ids), "hash": value, "first": ids[:4], "last": ids[-4:]}


def main():
    lines = []
    for merges in MERGES:
        tiktoken, huggingface = peers.tiktoken_gpt2(merges), peers.huggingface_gpt2(merges)
        for text in TEXTS:
            ids = tiktoken.encode_ordinary(text)
            if "<|endoftext|>" not in text:
                assert ids == huggingface.encode(text).ids, (merges, text)
            special = tiktoken.encode(text, allowed_special="all")
            assert special == huggingface.encode(text).ids, (merges, text)
            case = {"merges": merges, "text": text, "ids": ids}
            if special != ids:
                case["special"] = special
            lines.append(json.dumps(case))
        for unit, count, tail in RUNS:
            # tiktoken is quadratic or worse in the length of a word, so the other peer is asked.
            ids = huggingface.encode(unit * count + tail).ids
            lines.append(json.dumps({"merges": merges, "unit": unit, "times": count, "tail": tail, **run_summary(ids)}))
    (HERE / "tokenizer_fixtures.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
