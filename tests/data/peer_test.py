#!/usr/bin/env python3
"""Compares tokenizers, token stores and zarr arrays with the Python libraries whose formats they share.

Usage: peer_test.py PATH_TO_peer_test    (exit code 77: the libraries of requirements-test.txt are not installed)
"""
import codecs
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata
import unittest
import warnings

try:
    import numcodecs
    import numpy
    import sentencepiece
    import tokenizers
    import zarr

    import peers
    import sentence_piece_peers
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
    import make_longcrawl64
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


def random_escapes(count):
    """What a model of escaped text might write: whole, malformed and foreign escapes, quotes, bytes beyond ASCII."""
    source = random.Random(2)
    pieces = ["a", " the", "\\n", "\\t", "\\r", "\\b", "\\f", '\\"', "\\\\", "\\/", "\\u00e9", "\\u4e2d", "\\ud83d\\ude00", "\\ud83d", "\\ude00", "\\u12",
              "\\u", "\\x41", "\\x4", "\\101", "\\8", "\\07", "\\U0001F600", "\\U00110000", "\\U0001", "\\a", "\\v", "\\'", "\\q", "\\\n", "\n", '"', "é",
              "😀", "\\", "\\N", "\\Nx", "\\é", "\x7f", "9", "f"]
    return ["".join(source.choice(pieces) for _ in range(source.randrange(0, 8))) for _ in range(count)]


def published_decode(text):
    """The rules of LongCrawl64's tokenizer."""
    try:
        decoded = json.loads('"' + text + '"')
    except json.JSONDecodeError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of escapes that Python does not know
            decoded = text.encode("utf-8").decode("unicode_escape", errors="ignore")
    return decoded.encode("utf-8", errors="ignore").decode("utf-8")


def replacing_each_byte(error):
    """As sentencepiece decodes byte pieces that spell no character."""
    return "\ufffd", error.start + 1


codecs.register_error("replacing_each_byte", replacing_each_byte)


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
        cls.documents = cls.texts[:400]
        for number in range(4):
            folder = cls.dir / "slimpajama" / f"chunk{1 + number // 2}"
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}}, ensure_ascii=number % 2 == 0) + "\n"
                            for text in cls.documents[number * 100:number * 100 + 100])
            (folder / f"example_train_{number}.jsonl.zst").write_bytes(numcodecs.zstd.Zstd(level=3).encode(lines.encode("utf-8")))
        cls.escaped = random_escapes(20000)
        cls.write("escaped.json", cls.escaped)
        cls.make_sentence_pieces()
        cls.longcrawl64 = make_longcrawl64.make(cls.dir / "longcrawl64.zarr", 2100, 4196)
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
    def make_sentence_pieces(cls):
        folder = cls.dir / "sentence_piece"
        folder.mkdir()
        models = [sentence_piece_peers.train(folder, kind) for kind in sentence_piece_peers.KINDS]
        for kind in sentence_piece_peers.WITH_UNUSED:
            models.append(folder / f"{kind}_unused.model")
            models[-1].write_bytes(sentence_piece_peers.with_unused_pieces((folder / f"{kind}.model").read_bytes()))
        cls.sentence_pieces = {f"sentence_piece/{path.name}": sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in models}
        lines = sentence_piece_peers.sentences()
        texts = [*cls.texts, *lines[:300], "\n".join(lines), " ".join(lines) * 3, "a<sep>b fox <ctl> x\u2581x<s> a  b\u2581 ", " ", "\u2581", "", "   a   "]
        damaged = [b"\xff", b"a\xc3", b"\xe2\x96 \x81", b"\xf0\x9f\x98 x", b"\x80\xed\xa0\x80b"]
        cls.sentence_piece_texts = [text.encode("utf-8") for text in texts] + damaged
        cls.sentence_piece_ids = {name: sentence_piece_peers.random_ids(processor, 500, 3) for name, processor in cls.sentence_pieces.items()}
        cls.write("sentence_piece.json", {"texts": [text.hex() for text in cls.sentence_piece_texts], "ids": cls.sentence_piece_ids})

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

    def test_slimpajamas_layout_is_tokenized_as_tiktoken_does(self):
        encoding = peers.tiktoken_gpt2(50000)
        expected, starts = [], [0]
        for text in self.documents:
            expected += [50256, *encoding.encode_ordinary(text)]
            starts.append(len(expected))
        group = zarr.open_group(str(self.dir / "slimpajama-store"), mode="r")
        numpy.testing.assert_array_equal(group["tokens"][:], expected)
        numpy.testing.assert_array_equal(group["doc_offsets"][:], starts)

    def test_escaped_text_is_encoded_and_decoded_as_published(self):
        encoding = peers.tiktoken_gpt2(50000)
        for text, ids in zip(self.texts, self.read("ids-json.json"), strict=True):
            self.assertEqual(ids, encoding.encode_ordinary(json.dumps(text)[1:-1]), text)
        for text, decoded in zip(self.escaped, self.read("decoded.json"), strict=True):
            self.assertEqual(decoded, published_decode(text), text)

    def test_sentence_pieces_are_those_of_the_package(self):
        ours = self.read("sentence_piece_ours.json")
        for name, processor in self.sentence_pieces.items():
            mine = ours[name]
            self.assertEqual(mine["vocab_size"], processor.get_piece_size())
            self.assertEqual(mine["end_of_text"], processor.bos_id() if processor.bos_id() >= 0 else processor.eos_id())
            for text, ids in zip(self.sentence_piece_texts, mine["encoded"], strict=True):
                self.assertEqual(ids, processor.encode(text), (name, text[:200]))
            before = processor.encode("a")
            for ids, alone, behind in zip(self.sentence_piece_ids[name], mine["decoded"], mine["continued"], strict=True):
                decode = lambda digits: bytes.fromhex(digits).decode("utf-8", errors="replacing_each_byte")
                self.assertEqual(decode(alone), processor.decode(ids), (name, ids))
                self.assertEqual(processor.decode(before) + decode(behind), processor.decode(before + ids), (name, ids))

    def test_longcrawl64_is_read_as_zarr_reads_it(self):
        array = zarr.open(str(self.dir / "longcrawl64.zarr"), mode="r")
        self.assertEqual((array.chunks, array.dtype.str, array.compressor.cname), ((2048, 2048), "<u2", "lz4"))
        self.assertTrue((self.dir / "longcrawl64.zarr" / "1.2").is_file())
        tokens = numpy.fromfile(self.dir / "longcrawl64.bin", dtype="<u2").reshape(array.shape)
        numpy.testing.assert_array_equal(tokens, array[:])
        numpy.testing.assert_array_equal(tokens, self.longcrawl64)

    def test_arrays_of_others_read_the_same(self):
        for box in self.boxes:
            self.assertEqual((self.dir / box["file"]).read_bytes(), box["expected"], {k: v for k, v in box.items() if k != "expected"})


if __name__ == "__main__":
    unittest.main()
