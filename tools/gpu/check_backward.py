"""Checks the CUDA backward pass against float64 on a GPU.
usage: check_backward.py [--quick] [--sm80] [--only TEXT] [--out FILE.json]

A case passes if for dq, dk, dv and dlog_f the largest and the relative L2 error are at most twice those of the naive
computation in the same precision (plus a tiny amount), and all of the poisoned output was written. o and lse come from
the float64 reference, rounded, so that the forward pass has no part in it; --forward takes the kernel's. So do float32
cases: roundings of large logits cancel in weights alone that come with the lse of the same logits.
"""

import argparse
import functools
import json
import math
import time

import torch

import check_forward
import fox_backward as fb
import fox_kernels as fk

NAMES = ("dq", "dk", "dv", "dlog_f")


def cases(quick):
    yield from check_forward.cases(quick)
    if quick:
        return
    base = dict(B=1, Tq=None, Tk=8192, H=2, Hk=2, D=64, dtype="bf16", gate="medium")
    for D in (64, 128):
        for mean in (1, -1):
            yield {**base, "D": D, "logits": mean}
            yield {**base, "D": D, "logits": mean, "bounded": True}
        yield {**base, "D": D, "Tk": 700, "H": 4, "Hk": 2, "deterministic": True, "B": 2}
        yield {**base, "D": D, "Tk": 900, "Tq": 333, "deterministic": True, "B": 2, "window": 200}
        yield {**base, "D": D, "Tk": 700, "H": 24, "Hk": 24, "deterministic": True, "B": 2}
        # dS below fp16's normal numbers
        yield {**base, "D": D, "Tk": 2000, "dtype": "fp16", "gate": "weak", "d_o": 1e-4}
    for D in (64, 96, 128):  # near and far tiles with what cuts them
        far = {**base, "D": D, "Tk": 2500, "H": 4, "gate": "strong", "bounded": True}
        yield {**far, "dtype": "fp16"}
        yield {**far, "window": 1500, "deterministic": True}
        yield {**far, "documents": [0, 1900, 2500]}
        yield {**far, "B": 2, "seq_start": [0, 300]}
        yield {**far, "Tq": 1111}
    for D in (64, 128):  # several sections of heads, each cleared while the one before is worked on
        sections = {**base, "D": D, "B": 2, "Tk": 2100, "H": 24, "Hk": 24}
        for more in (dict(gate=None), dict(), dict(H=48), dict(deterministic=True), dict(window=300, Tq=1000),
                     dict(gate="log_spaced", tolerance=-10.0)):
            yield {**sections, **more}
    yield {**base, "D": 256, "B": 2, "Tk": 1500, "H": 16, "Hk": 16}
    yield {**base, "D": 256, "B": 2, "Tk": 700, "H": 24, "Hk": 24, "deterministic": True}
    yield {**base, "Tk": 16384, "H": 1, "Hk": 1, "logits": 1}


def bound(reference, naive, low):
    """Largest and relative L2 error allowed."""
    error, l2 = fk.errors(naive, reference)
    if low == torch.float32:
        # Where a row sees one key the naive weight is exactly 1, ours a rounded exponential, and dQ and dK are 0, of which
        # the roundings of dP and Δ are left: sums of products of unit size.
        return 2 * error + 8 * 2.0**-23 * max(reference.abs().max().item(), 1.0), 2 * l2 + 8 * 2.0**-23
    eps = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-23}[low]
    return 2 * error + eps * 0.1, 2 * l2 + eps * 0.1


def check(lib, c, use_forward, sm80=False):
    q, k, v, f, masks, dtype = check_forward.make(c)
    if "logits" in c:  # the gates of a forgetting model: what columns alone get wrong
        f = torch.nn.functional.logsigmoid(c["logits"] + 2 * torch.randn(f.shape, device="cuda"))
    d_o = (c.get("d_o", 1.0) * torch.randn(q.shape, device="cuda")).to(dtype)
    if "seq_start" in c:
        for b, start in enumerate(c["seq_start"]):
            d_o[b, :max(0, start - (k.shape[1] - q.shape[1]))] = float("nan")
    prune, kept = {}, {}
    if "tolerance" in c:
        prune = dict(log_tolerance=c["tolerance"], logit_bound=fk.logit_bound(q, k))
        kept_blocks = functools.partial(fk.kept_blocks, q, f, prune["logit_bound"], c["tolerance"], **masks)
        kept = dict(kept=kept_blocks(), kept_behind=kept_blocks)
    if "bounded" in c:
        prune = dict(logit_bound=fk.logit_bound(q, k, c.get("scale")))
        use_forward = False  # whose weights are rounded twice, see check_forward
    call = fb.Backward(lib, q, k, v, d_o, f, deterministic=c.get("deterministic", False), **masks, **prune, sm80=sm80)
    o, lse, *want = fb.gradients(q, k, v, d_o, f, **masks, **kept)
    naive = fb.gradients(q, k, v, d_o, f, dtype=torch.float32, low=dtype, **masks, **kept)[2:]
    call.run() if use_forward or dtype == torch.float32 else call.set_forward(o, lse)
    got = [x.clone() if x is not None else None for x in call.run_backward()]
    torch.cuda.synchronize()
    result, ok = dict(c), True
    for name, x, ref, low in zip(NAMES, got, want, naive):
        if x is None:
            continue
        error, l2 = fk.errors(x, ref)
        most, most_l2 = bound(ref, low if name == "dlog_f" else low.to(dtype), dtype)
        result[name] = [error, most, l2, most_l2]
        if not (error <= most and (l2 <= most_l2 or ref.abs().max() < 1e-6)):  # false for NaN
            ok = False
            result["bad"] = result.get("bad", "") + name + " "
    if f is not None:
        first = got[3][:, 0].abs().max().item()
        if first != 0 or ("logits" in c and result["dlog_f"][2] > 1e-2):
            ok, result["first"] = False, first
    if c.get("deterministic"):
        for _ in range(10):
            if not all(torch.equal(x, y) for x, y in zip(got, call.run_backward()) if x is not None):
                ok, result["bad"] = False, "not deterministic"
    result["ok"] = bool(ok)
    return result


def check_worst_logits(lib, sm80):
    """All logits at the bound, those of the first keys above and of the rest below it: what pruning leaves out of
    a row, forward and backward, comes near ε and never beyond. Weights show in o where v is 1 for the first and else
    0, and those of one row in dv where no other row has a gradient."""
    T, first, D, ok = 4096, 1024, 64, True
    for dtype in (torch.float32,) if sm80 else (torch.bfloat16, torch.float16):
        q = torch.ones(1, T, 1, D, device="cuda", dtype=dtype)
        k, v = (torch.cat([torch.ones_like(q[:, :first]), torch.full_like(q[:, first:], x)], 1) for x in (-1, 0))
        f, bound = torch.full((1, T, 1), -0.01, device="cuda"), torch.full((1,), D ** 0.5, device="cuda")
        d_o = torch.zeros_like(q)
        dense = fb.Backward(lib, q, k, v, d_o, f, logit_bound=bound, sm80=sm80)
        for tolerance in (-1.0, -4.0):
            pruned = fb.Backward(lib, q, k, v, d_o, f, logit_bound=bound, log_tolerance=tolerance, sm80=sm80)
            lost = [(dense.run()[0] - pruned.run()[0]).max().item(), 0]
            for i in range(first, T, 64):
                d_o.zero_()[:, i] = 1
                lost[1] = max(lost[1], (dense.run_backward()[2] - pruned.run_backward()[2])[..., 0].float().sum().item())
            ok = ok and all(0.1 * math.exp(tolerance) < x < math.exp(tolerance) + 4e-3 for x in lost)
    return ok


def check_nan(lib, sm80):
    """NaN of either sign in a query ends in NaN in its gradient and in those of the keys before it, and nothing of the
    other head sees it. (Keys behind it in its tile get 0 times NaN.)"""
    T, at, ok = 1024, 700, True
    for D, dtype, bits in ((D, dtype, bits) for D in (64, 128) for dtype in (torch.bfloat16, torch.float16)
                           for bits in (0x7FFF, -1)):
        q, k, v, d_o = (torch.randn(1, T, 2, D, device="cuda").to(dtype) for _ in range(4))
        q.view(torch.int16)[0, at, 0, 5] = bits
        for f in (None, torch.full((1, T, 2), -0.01, device="cuda")):
            call = fb.Backward(lib, q, k, v, d_o, f, sm80=sm80)
            call.run()
            dq, dk, dv = (x[0].isnan() for x in call.run_backward()[:3])
            ok = ok and all(x.all().item() for x in (dq[at, 0], dk[:at + 1, 0], dv[:at + 1, 0]))
            ok = ok and not any(x[:, 1].any().item() for x in (dq, dk, dv))
    return ok


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--quick", action="store_true")
    args.add_argument("--forward", action="store_true")
    args.add_argument("--sm80", action="store_true", help="the kernels for SM80 on whatever GPU there is")
    args.add_argument("--only", default="")
    args.add_argument("--library")
    args.add_argument("--out")
    args = args.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lib, start, results = fk.load(args.library) if args.library else fk.load(), time.time(), []
    for c in cases(args.quick):
        if args.only not in str(c):
            continue
        try:
            r = check(lib, c, args.forward, args.sm80)
        except RuntimeError as error:
            r = {**c, "ok": False, "error": str(error)[:200]}
        results.append(r)
        if not r["ok"]:
            print("FAIL", {k: [float(f"{x:.2e}") for x in y] if k in NAMES else y for k, y in r.items()}, flush=True)
            if "CUDA error" in r.get("error", "") or sum(not x["ok"] for x in results) > 14:
                break
    results.append({"case": "pruning at the worst logits", "ok": check_worst_logits(lib, args.sm80)})
    results.append({"case": "NaN in a query", "ok": check_nan(lib, args.sm80)})
    failed = sum(not r["ok"] for r in results)
    print(f"backward: {len(results) - failed} of {len(results)} cases passed in {time.time() - start:.1f} s", flush=True)
    for r in results:
        if "logits" in r and "dlog_f" in r:
            print("dlog_f relative L2", {k: r[k] for k in ("D", "Tk", "logits")}, f"{r['dlog_f'][2]:.2e}")
    if args.out:
        json.dump(results, open(args.out, "w"), default=str, indent=0)
    return failed != 0


if __name__ == "__main__":
    raise SystemExit(main())
