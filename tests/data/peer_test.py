#!/usr/bin/env python3
"""Compares tokenizers, token stores and zarr arrays with the Python libraries whose formats they share.

Usage: peer_test.py PATH_TO_peer_test    (exit code 77: the libraries of requirements-test.txt are not installed)
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata
import unittest

try:
    import numcodecs
    import numpy
    import tokenizers
    import zarr

    import peers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

BINARY = sys.argv.pop(1)
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                  r"|\s+(?!\S)|\s+")


def random_texts(count):
    """Texts of pieces that the pattern treats differently, and of any assigned character."""
    source = random.Random(1)
    pieces = [" ", "  ", "\n", "\r\n", "\t", "'s", "'ll", "'", "the", "The", "12", "7", "!", "...", "\u00a0", "\u3000", "é", "e\u0301",
              "中", "文", "😀", "\u200d", "\ufe0f", "ß", "\u180e", "\u0085", "\u2028", "ا", "क", "़", "²", "Ⅷ", "_", "<|", "|>"]
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    texts = []
    for _ in range(count):
        texts.append("".join(source.choice(assigned) if source.random() < 0.3 else source.choice(pieces)
                             for _ in range(source.randrange(1, 40))))
    return texts


def llama3_like(regex_byte_level):
    """A byte-level tokenizer with another pattern, as Llama 3's is written."""
    tokenizer = peers.huggingface_gpt2(20000)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated", invert=False)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex_byte_level)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


class PeerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = pathlib.Path(cls.folder.name)
        cls.texts = random_texts(3000)
        cls.write("texts.json", cls.texts)
        cls.foreign = {"gpt2.json": peers.huggingface_gpt2(50000), "llama.json": llama3_like(False), "both.json": llama3_like(True)}
        for name, tokenizer in cls.foreign.items():
            tokenizer.save(str(cls.dir / name))
        cls.write("tokenizers.json", list(cls.foreign))
        cls.corpus = {"a.txt": "In the beginning God created the heaven and the earth.\n" * 30000, "b.txt": "", "c.txt": "😀 end"}
        (cls.dir / "corpus").mkdir()
        for name, text in cls.corpus.items():
            (cls.dir / "corpus" / name).write_text(text, encoding="utf-8")
        cls.boxes = cls.make_arrays()
        cls.write("boxes.json", [{k: v for k, v in box.items() if k != "expected"} for box in cls.boxes])
        environment = {**os.environ, "FOX_PEER_DIR": str(cls.dir)}
        subprocess.run([BINARY, "--gtest_brief=1"], check=True, env=environment, timeout=300)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def write(cls, name, value):
        (cls.dir / name).write_text(json.dumps(value), encoding="utf-8")

    @classmethod
    def read(cls, name):
        return json.loads((cls.dir / name).read_text(encoding="utf-8"))

    @classmethod
    def make_arrays(cls):
        """Arrays of one to four dimensions in every encoding that is read; the second is laid out as LongCrawl64 is."""
        blosc = lambda cname, shuffle: numcodecs.Blosc(cname=cname, clevel=5, shuffle=shuffle)
        kinds = [((5000,), (700,), "<u2", blosc("lz4", 1)), ((4500, 6200), (2048, 2048), "<u2", blosc("lz4", 1)), ((7, 9, 11), (3, 4, 5), "<f4", blosc("zstd", 2)),
                 ((4, 5, 6, 7), (2, 2, 2, 7), "<i8", None), ((10,), (100,), "|u1", blosc("blosclz", 0)), ((33, 2), (33, 2), "<f8", blosc("zlib", 1))]
        source = numpy.random.default_rng(1)
        boxes = []
        for number, (shape, chunks, dtype, compressor) in enumerate(kinds):
            name = f"array-{number}"
            data = source.integers(0, 200, shape).astype(dtype)
            array = zarr.open(str(cls.dir / name), mode="w", shape=shape, chunks=chunks, dtype=dtype, compressor=compressor,
                              dimension_separator="/" if number == 2 else ".", zarr_version=2)
            array[...] = data
            for _ in range(6):
                start = [int(source.integers(0, n)) for n in shape]
                count = [int(source.integers(1, n - s + 1)) for s, n in zip(start, shape)]
                if not boxes or boxes[-1]["array"] != name:
                    start, count = [0] * len(shape), list(shape)
                expected = data[tuple(slice(s, s + c) for s, c in zip(start, count))].tobytes()
                boxes.append({"array": name, "dtype": dtype, "start": start, "count": count, "file": f"box-{len(boxes)}.bin", "expected": expected})
        return boxes

    def test_ids_equal_those_of_both_peers(self):
        for merges in (50000, 768, 0):
            ids = self.read(f"ids-{merges}.json")
            for text, got, expected in zip(self.texts, ids, peers.huggingface_gpt2(merges).encode_batch(self.texts), strict=True):
                self.assertEqual(got, expected.ids, (merges, text))
            encoding = peers.tiktoken_gpt2(merges)
            for text, got in zip(self.texts, ids):
                self.assertEqual(got, encoding.encode_ordinary(text), (merges, text))

    def test_saved_tokenizers_load_and_encode_the_same(self):
        for merges in (50000, 768, 0):
            loaded = tokenizers.Tokenizer.from_file(str(self.dir / f"tokenizer-{merges}.json"))
            self.assertEqual(loaded.get_vocab_size(), merges + 257)
            self.assertEqual(loaded.token_to_id("<|endoftext|>"), merges + 256)
            for text, ids in zip(self.texts, self.read(f"ids-{merges}.json"), strict=True):
                self.assertEqual(loaded.encode(text).ids, ids, (merges, text))
                self.assertEqual(loaded.decode(ids), text)

    def test_tokenizers_of_others_encode_the_same(self):
        for name, tokenizer in self.foreign.items():
            for text, ids in zip(self.texts, self.read(f"ids-{name}"), strict=True):
                self.assertEqual(ids, tokenizer.encode(text).ids, (name, text))

    def test_token_store_is_a_zarr_group(self):
        group = zarr.open_group(str(self.dir / "store"), mode="r")
        tokens, offsets = group["tokens"][:], group["doc_offsets"][:]
        self.assertEqual(tokens.dtype, numpy.dtype("<u2"))
        self.assertEqual(offsets.dtype, numpy.dtype("<i8"))
        expected, starts = [], [0]
        encoding = peers.huggingface_gpt2(768)
        for text in self.corpus.values():
            expected += [1024, *encoding.encode(text).ids]
            starts.append(len(expected))
        numpy.testing.assert_array_equal(tokens, expected)
        numpy.testing.assert_array_equal(offsets, starts)
        self.assertEqual([pathlib.Path(s["path"]).name for s in group.attrs["sources"]], list(self.corpus))

    def test_arrays_of_others_read_the_same(self):
        for box in self.boxes:
            self.assertEqual((self.dir / box["file"]).read_bytes(), box["expected"], {k: v for k, v in box.items() if k != "expected"})


if __name__ == "__main__":
    unittest.main()
