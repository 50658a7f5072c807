"""SentencePiece models of many kinds, trained by the Python package on the project's own documents, and what it makes of
texts and ids. Nothing is fetched."""
import pathlib
import random

import sentencepiece

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = {
    # as Llama 2's; as T5's, with a piece for padding and none for a beginning
    "llama": dict(model_type="bpe", vocab_size=800, byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True,
                  remove_extra_whitespaces=False, normalization_rule_name="identity"),
    "t5": dict(model_type="unigram", vocab_size=600, pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    "unigram_bytes": dict(model_type="unigram", vocab_size=700, byte_fallback=True, normalization_rule_name="nfkc_cf"),
    "unigram_as_it_is": dict(model_type="unigram", vocab_size=500, add_dummy_prefix=False, remove_extra_whitespaces=False,
                             normalization_rule_name="identity", user_defined_symbols=["<sep>", "fox", "a  b", "\u2581x"], control_symbols=["<ctl>"]),
    "unigram_suffix": dict(model_type="unigram", vocab_size=500, treat_whitespace_as_suffix=True),
    "bpe": dict(model_type="bpe", vocab_size=600, user_defined_symbols=["<sep>", "fox", "<"], control_symbols=["<ctl>"]),
    "bpe_suffix": dict(model_type="bpe", vocab_size=500, treat_whitespace_as_suffix=True, remove_extra_whitespaces=False),
    "bpe_phrases": dict(model_type="bpe", vocab_size=900, split_by_whitespace=False, byte_fallback=True),
    "bpe_no_prefix": dict(model_type="bpe", vocab_size=500, add_dummy_prefix=False, normalization_rule_name="nmt_nfkc_cf"),
}
# These are also made with every seventh piece unused.
WITH_UNUSED = ("bpe", "unigram_bytes")


def sentences():
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    return [line for line in text.split("\n") if line.strip()]


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            return value, at


def to_varint(value):
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def with_unused_pieces(model):
    """The model with every seventh normal piece of more than one character of type UNUSED (5)."""
    out, at, number = b"", 0, 0
    while at < len(model):
        tag, at = varint(model, at)
        size, at = varint(model, at)
        body = model[at:at + size]
        at += size
        if tag == 10:  # a piece; those that name no type are normal
            text_size = body[1]
            number += 1
            if len(body) == 2 + text_size + 5 and number % 7 == 0 and len(body[2:2 + text_size].decode("utf-8")) > 1:
                body += b"\x18\x05"
        out += bytes([tag]) + to_varint(len(body)) + body
    return out


def train(folder, kind, **more):
    """Writes folder/kind.model."""
    source = folder / "sentences.txt"
    source.write_text("\n".join(sentences()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(input=str(source), model_prefix=str(folder / kind), hard_vocab_limit=False, minloglevel=2,
                                             num_threads=1, **{**KINDS[kind], **more})
    return folder / f"{kind}.model"


def random_ids(processor, count, seed):
    """Ids as a model may write them: any, bytes in runs, beginnings in the middle."""
    source = random.Random(seed)
    pieces = range(processor.get_piece_size())
    runs = [[i] for i in pieces if not processor.is_byte(i)]
    byte_ids = [i for i in pieces if processor.is_byte(i)]
    out = []
    for _ in range(count):
        ids = []
        for _ in range(source.randrange(0, 12)):
            if byte_ids and source.random() < 0.2:
                text = source.choice(["é", "中", "😀", "\u2581", " "]).encode("utf-8")
                ids += [byte_ids[b] for b in (text if source.random() < 0.7 else text[:-1])] + [source.choice(byte_ids)] * (source.random() < 0.3)
                ids += processor.encode("a")[-1:]
            ids += source.choice(runs)
        out.append(ids)
    return out
