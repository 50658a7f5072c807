"""GPT-2's tokenizer, whole or with its first merges only, as tiktoken and as Hugging Face's tokenizers build it from the
merge list. Nothing is fetched."""
import pathlib

import tiktoken
import tokenizers

VOCAB_BPE = pathlib.Path(__file__).resolve().parents[2] / "third_party/gpt2/vocab.bpe"
# radford2019, encoder.py
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def alphabet():
    """Byte → character, in the order of GPT-2's ids (radford2019, bytes_to_unicode)."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in own]
    return {**{b: chr(b) for b in own}, **{b: chr(256 + n) for n, b in enumerate(others)}}


def merge_list(count):
    lines = VOCAB_BPE.read_text(encoding="utf-8").split("\n")[1:]
    return [tuple(line.split(" ")) for line in lines[:count]]


def tiktoken_gpt2(count):
    byte_of = {c: b for b, c in alphabet().items()}
    ranks = {bytes([b]): n for n, b in enumerate(alphabet())}
    for left, right in merge_list(count):
        ranks[bytes(byte_of[c] for c in left + right)] = len(ranks)
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def huggingface_gpt2(count):
    vocab = {c: n for n, c in enumerate(alphabet().values())}
    for left, right in merge_list(count):
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merge_list(count)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer
