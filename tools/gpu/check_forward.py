"""Checks the CUDA forward pass against float64 on a GPU. usage: check_forward.py [--quick] [--sm80] [--out FILE.json]

A case passes if the error of o, largest and relative L2, is at most twice that of the naive computation in the same
precision (plus a tiny amount), lse is within 2e-3 + 2 naive errors, and all of the poisoned output was written. Where
blocks are pruned the reference leaves out the same, and is itself within pruning's proven bound of the dense one.
"""

import argparse
import itertools
import json
import math
import time
import zlib

import torch

import fox_kernels as fk


def gates(kind, B, T, H):
    if kind is None:
        return None
    x = torch.nn.functional.logsigmoid({"weak": 6.0, "medium": 3.0, "strong": 0.0}.get(kind, 3.0)
                                       + torch.randn(B, T, H, device="cuda"))
    pick = torch.rand(B, T, H, device="cuda")
    if kind == "resets":
        x = torch.where(pick < 0.03, -torch.inf, x)
    elif kind == "all_inf":
        x = torch.full_like(x, -torch.inf)
    elif kind == "all_1e4":
        x = torch.full_like(x, -1e4)
    elif kind == "mixed":
        x = torch.where(pick < 0.1, -1e4, torch.where(pick < 0.2, -100.0, x))
    elif kind == "ones":
        x = torch.zeros_like(x)
    return x


def cases(quick):
    base = dict(B=2, Tq=None, Tk=300, H=2, Hk=2, D=64, dtype="bf16", gate="medium")
    for D in (64, 128):
        for T in (64, 1, 63, 65, 127, 128, 129, 191, 192, 193, 257, 1000):
            for gate in (None, "medium"):
                yield {**base, "D": D, "Tk": T, "gate": gate}
    if quick:
        return
    for D in (64, 128):
        yield {**base, "D": D, "Tk": 4095, "B": 1}
        yield {**base, "D": D, "Tk": 4095, "B": 1, "gate": None}
        for gate in ("weak", "strong", "resets", "all_inf", "all_1e4", "mixed", "ones"):
            yield {**base, "D": D, "Tk": 520, "gate": gate}
        for Tq in (1, 17, 64, 299):
            for gate in (None, "medium"):
                yield {**base, "D": D, "Tq": Tq, "gate": gate}
        yield {**base, "D": D, "Tq": 1000, "Tk": 1500}
        for window in (1, 64, 100, 1000):
            for gate in (None, "medium"):
                yield {**base, "D": D, "Tk": 1300, "window": window, "gate": gate}
        for Hk in (1, 2, 4):
            yield {**base, "D": D, "H": 8, "Hk": Hk}
        for layout in ("packed", "head_first", "padded"):
            yield {**base, "D": D, "layout": layout}
        for gate in (None, "medium"):
            yield {**base, "D": D, "Tk": 700, "seq_start": [37, 500], "gate": gate}
            yield {**base, "D": D, "Tk": 700, "seq_start": [0, 700], "gate": gate}
            yield {**base, "D": D, "Tq": 100, "Tk": 700, "seq_start": [650, 3], "gate": gate}
            yield {**base, "D": D, "B": 1, "Tk": 1000, "documents": [0, 1, 1, 300, 301, 555, 1000], "gate": gate}
            yield {**base, "D": D, "B": 1, "Tk": 1000, "documents": [0, 640, 1000], "window": 128, "gate": gate}
        yield {**base, "D": D, "Tk": 2000, "tolerance": -10.0, "gate": "strong"}
        yield {**base, "D": D, "Tk": 2000, "Tq": 777, "tolerance": -10.0, "gate": "log_spaced", "H": 8}
        pruned = {**base, "D": D, "Tk": 2000, "tolerance": -10.0, "gate": "log_spaced", "H": 8}
        for gate, window in (("strong", 100), ("log_spaced", 700)):
            yield {**pruned, "gate": gate, "window": window}
            yield {**pruned, "gate": gate, "window": window, "Tq": 777}
        for documents in ([0, 1, 1, 300, 301, 1255, 2000], [0, 1280, 2000]):
            yield {**pruned, "B": 1, "documents": documents}
            yield {**pruned, "B": 1, "documents": documents, "Hk": 8, "window": 500}
        yield {**pruned, "seq_start": [37, 900], "Hk": 8}
        yield {**pruned, "seq_start": [1990, 64], "window": 300, "Tq": 1500}
        yield {**base, "D": D, "Tk": 520, "scale": 1.0}
        for gate in (None, "medium", "resets", "all_inf"):  # a small bound of the logits: no running maximum
            yield {**base, "D": D, "Tk": 1000, "bounded": True, "gate": gate}
            yield {**base, "D": D, "Tk": 450, "dtype": "fp16", "bounded": True, "scale": 0.04, "gate": gate}
        yield {**base, "D": D, "Tk": 700, "seq_start": [37, 500], "window": 200, "bounded": True}
        for gate in ("weak", "strong", "mixed", "ones", "log_spaced", "all_1e4"):
            yield {**base, "D": D, "Tk": 1300, "bounded": True, "gate": gate}
        for Tq, Tk in ((1, 128), (1, 256), (2, 129), (65, 256), (129, 511), (300, 1027), (1000, 1500), (1, 1000)):
            yield {**base, "D": D, "Tq": Tq, "Tk": Tk, "bounded": True}
        for more in ({"H": 8, "Hk": 2, "gate": "strong"}, {"layout": "packed"}, {"window": 100}, {"window": 1000}):
            yield {**base, "D": D, "Tk": 1300, "bounded": True, **more}
        yield {**base, "D": D, "B": 1, "Tk": 1000, "documents": [0, 1, 1, 300, 301, 555, 1000], "bounded": True}
        yield {**base, "D": D, "B": 1, "Tk": 1000, "documents": [0, 640, 1000], "gate": "resets", "bounded": True}
        yield {**base, "D": D, "Tk": 700, "Tq": 300, "seq_start": [650, 256], "bounded": True}
    for D in (8, 16, 32, 40, 72, 80, 96, 104, 136, 192, 200, 256):
        for gate in (None, "medium"):
            yield {**base, "D": D, "gate": gate, "Tk": 450}
    for D in (32, 64, 96, 128, 192, 256):
        for gate in (None, "medium"):
            yield {**base, "D": D, "gate": gate, "dtype": "fp16", "Tk": 450}
    yield from float32_cases()
    yield from crowded_cases()
    yield {**base, "B": 300, "H": 300, "Hk": 300, "Tk": 5, "D": 8, "gate": "medium"}  # B·H above 65,535
    yield {**base, "B": 1, "Tq": 64, "Tk": 393088}  # the most blocks whose marks the scan keeps in shared memory
    yield {**base, "B": 1, "Hk": 1, "Tq": 1500, "Tk": 40000, "tolerance": -10.0}  # more than 512 blocks of keys
    if torch.cuda.mem_get_info()[1] > 64 << 30:  # and of queries: the reference takes 50 GB
        yield {**base, "B": 1, "H": 1, "Hk": 1, "Tk": 33000, "tolerance": -10.0}


def crowded_cases():
    """More tiles of queries and blocks of keys than multiprocessors, which then work on several in turn."""
    base = dict(B=2, Tq=None, Tk=1030, H=24, Hk=24, D=64, dtype="bf16", gate="medium")
    for D in (64, 128):
        for more in (dict(gate=None), dict(), dict(gate="strong", bounded=True), dict(H=48), dict(dtype="fp16"),
                     dict(Tq=500, window=200), dict(seq_start=[37, 900]), dict(gate="log_spaced", tolerance=-10.0),
                     dict(H=48, gate="log_spaced", tolerance=-10.0),
                     dict(B=1, H=48, Hk=48, documents=[0, 1, 1, 300, 301, 555, 1030])):
            yield {**base, "D": D, **more}
    for D in (32, 96, 192, 256):
        for more in (dict(gate=None), dict(), dict(Tq=400, window=150), dict(seq_start=[37, 600])):
            yield {**base, "D": D, "Tk": 700, **more}


def float32_cases():
    """What the SM80 kernels run on every GPU."""
    base = dict(B=2, Tq=None, Tk=300, H=2, Hk=2, D=64, dtype="fp32", gate="medium")
    for D in (8, 40, 64, 96, 128, 200, 256):
        for gate in (None, "medium"):
            yield {**base, "D": D, "gate": gate}
    for T in (1, 63, 64, 65, 127, 129, 1000):
        yield {**base, "Tk": T}
    for gate in ("weak", "strong", "resets", "all_inf", "all_1e4", "mixed", "ones"):
        yield {**base, "gate": gate}
    for more in (dict(Tq=17), dict(Tq=299), dict(window=1), dict(window=100), dict(seq_start=[37, 300]), dict(H=8, Hk=2),
                 dict(layout="packed"), dict(B=1, documents=[0, 1, 1, 100, 101, 300]), dict(scale=1.0),
                 dict(Tk=2000, gate="strong", tolerance=-10.0),
                 dict(Tk=2000, gate="log_spaced", tolerance=-10.0, H=8, Hk=2, window=700),
                 dict(B=1, Tk=2000, gate="log_spaced", tolerance=-10.0, H=8, documents=[0, 1, 300, 1255, 2000]),
                 dict(D=128, Tk=700, seq_start=[650, 3], Tq=100, window=64)):
        yield {**base, **more}


def is_short(c):
    """Each code path about once: for runs under compute-sanitizer."""
    plain = c["gate"] in (None, "medium") and not set(c) & {"window", "seq_start", "documents", "layout", "scale"}
    return c["Tk"] <= 700 and c["B"] < 100 and (not plain or c["Tk"] in (129, 450) or c["Tq"] == 17)


def make(c):
    torch.manual_seed(zlib.crc32(repr(sorted(c.items())).encode()))  # the same numbers whatever cases run before
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[c["dtype"]]
    B, Tk, H, Hk, D = c["B"], c["Tk"], c["H"], c["Hk"], c["D"]
    Tq = c["Tq"] or Tk
    layout = c.get("layout")
    if layout == "packed":
        x = torch.randn(B, Tk, (H + 2 * Hk) * D, device="cuda", dtype=dtype)
        q, k, v = (y.unflatten(-1, (-1, D)) for y in x.split([H * D, Hk * D, Hk * D], -1))
    elif layout == "head_first":
        q, k, v = (torch.randn(B, h, t, D, device="cuda", dtype=dtype).transpose(1, 2)
                   for h, t in ((H, Tq), (Hk, Tk), (Hk, Tk)))
    elif layout == "padded":
        q, k, v = (torch.randn(B, t, h, D + 24, device="cuda", dtype=dtype)[..., 8:8 + D]
                   for h, t in ((H, Tq), (Hk, Tk), (Hk, Tk)))
    else:
        q, k, v = (torch.randn(B, t, h, D, device="cuda", dtype=dtype) for h, t in ((H, Tq), (Hk, Tk), (Hk, Tk)))
    f = fk.log_spaced_gates(B, Tk, H, 8, 4096) if c["gate"] == "log_spaced" else gates(c["gate"], B, Tk, H)
    masks = {"window": c.get("window", 0)}
    if "seq_start" in c:
        masks["seq_start"] = torch.tensor(c["seq_start"], device="cuda")
        for b, start in enumerate(c["seq_start"]):  # what is in padding must not matter
            k[b, :start] = float("nan")
            v[b, :start] = float("nan")
            q[b, :max(0, start - (Tk - Tq))] = float("nan")
            if f is not None:
                f[b, :start] = float("nan")
    if "documents" in c:
        masks["cu_seqlens"] = torch.tensor(c["documents"], device="cuda")
    if "scale" in c:
        masks["scale"] = c["scale"]
    return q, k, v, f, masks, dtype


def check(lib, c, sm80=False):
    q, k, v, f, masks, dtype = make(c)
    prune, kept = {}, {}
    if "tolerance" in c:
        prune = dict(log_tolerance=c["tolerance"], logit_bound=fk.logit_bound(q, k))
        kept = dict(kept=fk.kept_blocks(q, f, prune["logit_bound"], c["tolerance"], **masks))
    if "bounded" in c:
        prune = dict(logit_bound=fk.logit_bound(q, k, c.get("scale")))
    call = fk.Forward(lib, q, k, v, f, **masks, **prune, sm80=sm80)
    o, lse = call.run()
    torch.cuda.synchronize()
    ref, ref_lse = fk.reference(q, k, v, f, **masks, **kept)
    naive, naive_lse = fk.reference(q, k, v, f, dtype=torch.float32, low=dtype, **masks, **kept)
    (e, l2), (ne, nl2) = fk.errors(o, ref), fk.errors(naive.to(dtype), ref)
    empty = ref_lse == -torch.inf
    lse_error = (lse.double() - ref_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
    naive_lse_error = (naive_lse.double() - ref_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
    tiny = {torch.bfloat16: 1e-3, torch.float16: 2e-4, torch.float32: 1e-6}[dtype]
    tiny_l2, tiny_lse = (1e-7, 1e-6) if dtype == torch.float32 else (1e-4, 2e-3)
    if "bounded" in c:  # weights are rounded where they stand, not near 1, so even a row with one key is rounded twice
        tiny, tiny_l2 = max(tiny, torch.finfo(dtype).eps * ref.abs().max().item()), torch.finfo(dtype).eps / 2
    ok = e <= 2 * ne + tiny and l2 <= 2 * nl2 + tiny_l2 and lse_error <= 2 * naive_lse_error + tiny_lse
    ok = ok and not (lse[empty] != -torch.inf).any().item() and not (o.transpose(1, 2)[empty] != 0).any().item()
    ok = ok and not torch.isnan(o).any().item() and not torch.isnan(lse).any().item()
    result = {**c, "error": e, "naive_error": ne, "l2": l2, "naive_l2": nl2, "lse_error": lse_error}
    if "tolerance" in c:
        count = call.kept_blocks()
        result["kept"], result["kept_right"] = count.sum().item(), bool((count == kept["kept"].sum((-1, -2))).all())
        # What pruning itself may change: 2 ε max|V|.
        result["to_dense"] = fk.errors(ref, fk.reference(q, k, v, f, **masks)[0])[0]
        most = 2 * math.exp(c["tolerance"]) * v.nan_to_num().abs().max().item()
        ok = ok and result["kept_right"] and result["to_dense"] <= most
    if c["gate"] == "ones":  # a gate that never forgets is plain attention
        plain, _ = fk.Forward(lib, q, k, v, None, **masks, sm80=sm80).run()
        result["to_plain"] = (o.float() - plain.float()).abs().max().item()
        ok = ok and result["to_plain"] <= 0.02
    result["ok"] = bool(ok) and call.bad_gate.item() == 0
    return result


def check_bad_gates(lib, sm80):
    """A gate above 0 or NaN is reported with its place, and rows from it on are NaN; rows before are not. With pruning
    the rows of a tile that stand before it begin at later keys than 0."""
    ok = True
    for dtype, D in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        for bad, tolerance in itertools.product((1e-3, float("nan")), (None, -10.0)):
            q = k = v = torch.randn(2, 800, 3, D, device="cuda", dtype=dtype)
            f = -torch.rand(2, 800, 3, device="cuda")
            f[1, 710, 2] = bad
            prune = {} if tolerance is None else dict(log_tolerance=tolerance, logit_bound=fk.logit_bound(q, k))
            call = fk.Forward(lib, q, k, v, f, sm80=sm80, **prune)
            nan = torch.isnan(call.run()[0]).any(-1)
            ok = ok and nan[1, 710:, 2].all().item() and call.bad_gate.item() % 2**64 == 1 << 63 | 1 << 48 | 2 << 32 | 710
            nan[1, 640:, 2] = False  # the tile of 128 keys that the gate is in
            ok = ok and not nan.any().item()
    return ok


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--quick", action="store_true", help="few lengths, without the special cases")
    args.add_argument("--sm80", action="store_true", help="the kernels for SM80 on whatever GPU there is")
    args.add_argument("--short", action="store_true", help="one case of each kind up to 700 keys, for sanitizers")
    args.add_argument("--out")
    args = args.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lib, start = fk.load(), time.time()
    results = []
    for c in (x for x in cases(args.quick) if not args.short or is_short(x)):
        try:
            r = check(lib, c, args.sm80)
        except RuntimeError as error:
            r = {**c, "ok": False, "error": str(error)[:200]}
        results.append(r)
        if not r["ok"]:
            print("FAIL", r, flush=True)
            if "CUDA error" in str(r["error"]) or sum(not x["ok"] for x in results) > 12:
                break
    results.append({"case": "gates that are none", "ok": check_bad_gates(lib, args.sm80)})
    failed = sum(not r["ok"] for r in results)
    print(f"forward: {len(results) - failed} of {len(results)} cases passed in {time.time() - start:.1f} s", flush=True)
    if args.out:
        json.dump(results, open(args.out, "w"), default=str, indent=0)
    return failed != 0


if __name__ == "__main__":
    raise SystemExit(main())
