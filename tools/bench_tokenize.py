#!/usr/bin/env python3
"""`fox tokenize` against Hugging Face's `tokenizers` (encode_batch), or with a .model file against `sentencepiece` (encode), on
the same documents and threads, in turns.

The documents are the text files below the folders named, cut to at most 16 KiB each. fox reads them as JSON lines, compressed,
and writes its token store, all of which is timed, start of the program included; of the peer encoding alone is timed.

Usage: bench_tokenize.py [--fox build/fox] [--threads 2] [--mib 64] [--repeats 5]
       [--tokenizer gpt2|FILE.model] FOLDER…   → one JSON object on standard output
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--fox", default="build/fox")
arguments.add_argument("--threads", type=int, default=2)
arguments.add_argument("--mib", type=int, default=64)
arguments.add_argument("--repeats", type=int, default=5)
arguments.add_argument("--tokenizer", default="gpt2")
arguments.add_argument("folders", nargs="+")
options = arguments.parse_args()
os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # before tokenizers starts its threads
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import numcodecs
import numpy
import zarr

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/data"))
import peers


def collect_documents(folders, limit):
    documents, size = [], 0
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix not in (".txt", ".py", ".md", ".rst", ".h") or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            for begin in range(0, len(text), 16384):
                documents.append(text[begin:begin + 16384])
                size += len(documents[-1].encode())
                if size >= limit:
                    return documents, size
    return documents, size


documents, size = collect_documents(options.folders, options.mib << 20)
if options.tokenizer == "gpt2":
    name, start_id, gpt2 = "tokenizers", 50256, peers.huggingface_gpt2(50000)
    encode = lambda: [encoding.ids for encoding in gpt2.encode_batch(documents)]
else:
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=options.tokenizer)
    name, start_id = "sentencepiece", processor.bos_id() if processor.bos_id() >= 0 else processor.eos_id()
    encode = lambda: processor.encode(documents, num_threads=options.threads)
seconds = {"fox": [], name: []}
with tempfile.TemporaryDirectory() as folder:
    corpus = pathlib.Path(folder) / "corpus"
    corpus.mkdir()
    per_file = len(documents) // 8 + 1
    for begin in range(0, len(documents), per_file):
        lines = "".join(json.dumps({"text": text, "meta": {}}, ensure_ascii=False) + "\n" for text in documents[begin:begin + per_file])
        (corpus / f"{begin:08}.jsonl.zst").write_bytes(numcodecs.zstd.Zstd(level=3).encode(lines.encode()))
    for repeat in range(options.repeats):
        start = time.perf_counter()
        encoded = encode()
        seconds[name].append(time.perf_counter() - start)
        tokens = sum(len(ids) for ids in encoded)
        if repeat == 0:
            expected = numpy.concatenate([numpy.array([start_id, *ids], dtype="<u2") for ids in encoded])
        del encoded
        out = f"{folder}/store-{repeat}"
        start = time.perf_counter()
        subprocess.run([options.fox, "tokenize", str(corpus), "--out", out, "--threads", str(options.threads),
                        "--tokenizer", options.tokenizer], check=True, stderr=subprocess.DEVNULL)
        seconds["fox"].append(time.perf_counter() - start)
        if repeat == 0:
            numpy.testing.assert_array_equal(zarr.open_group(out, mode="r")["tokens"][:], expected)
ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds["fox"])]
print(json.dumps({"bench": "tokenize", "tokenizer": pathlib.Path(options.tokenizer).name, "bytes": size, "documents": len(documents), "tokens": tokens, "threads": options.threads,
                  "fox_s": statistics.median(seconds["fox"]), f"{name}_s": statistics.median(seconds[name]),
                  "fox_tokens_per_s": tokens / statistics.median(seconds["fox"]), "ratio": statistics.median(ratios),
                  "ratios": [round(r, 3) for r in ratios]}))
