#!/usr/bin/env python3
"""Writes a small store of exactly LongCrawl64's layout: a zarr v2 array of u2 at the root of a folder, one document a row,
chunks of 2048 x 2048 with Blosc (lz4, shuffle) in files "row.column", those at the edges padded. Tokens are random.

Usage: make_longcrawl64.py FOLDER [--documents 2100] [--tokens 65536] [--seed 0]      (needs requirements-test.txt)
"""
import argparse

import numcodecs
import numpy
import zarr


def make(folder, documents, tokens, seed=0):
    """Returns what was written."""
    # Ids as common as words are: they compress about as text does.
    data = (numpy.random.default_rng(seed).zipf(1.2, (documents, tokens)) % 50256).astype("<u2")
    blosc = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE, blocksize=0)
    array = zarr.open(str(folder), mode="w", shape=data.shape, chunks=(2048, 2048), dtype="<u2", compressor=blosc, fill_value=0, order="C",
                      zarr_version=2)
    array[...] = data
    return data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--documents", type=int, default=2100)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.documents, arguments.tokens, arguments.seed)
