#!/usr/bin/env python3
"""What users of the attention operators meet on a GPU beyond right numbers in 16 bits: float32, refused dtypes and gates,
decoding from a paged cache. The CPU side of each operator is the reference.

usage: tools/gpu/check_attention_ops.py BUILD [--out FILE.json]     BUILD holds libfox.so and libfox_cuda.so
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys

import torch
import torch.nn.functional as F

RESULTS = []


def case(name, ok):
    RESULTS.append({"case": name, "ok": bool(ok)})
    if not ok:
        print("FAIL", name, flush=True)


def load(build):
    for name in ("libfox.so", "libfox_cuda.so"):
        ctypes.CDLL(os.path.join(build, name), mode=ctypes.RTLD_GLOBAL)


def float32():
    """Against float64 on the CPU, with twice the error of float32 there plus roundings of the largest value."""
    for B, Tq, Tk, H, Hk, D, options in [(2, 130, 130, 4, 4, 64, {}), (1, 5, 300, 4, 2, 128, {"window": 64}),
                                         (1, 257, 257, 2, 2, 40, {}), (1, 100, 100, 2, 1, 256, {})]:
        q, k, v = torch.randn(B, Tq, H, D), torch.randn(B, Tk, Hk, D), torch.randn(B, Tk, Hk, D)
        f, d_o = F.logsigmoid(torch.randn(B, Tk, H) * 2 + 1), torch.randn(B, Tq, H, D)

        def run(dtype, device):
            leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in (q, k, v, f)]
            o = torch.ops.fox.forgetting_attn(*leaves, **options)[0]
            o.backward(d_o.to(device, dtype))
            return [o.detach().double().cpu()] + [x.grad.double().cpu() for x in leaves]

        exact, cpu, cuda = run(torch.float64, "cpu"), run(torch.float32, "cpu"), run(torch.float32, "cuda")
        for name, e, x, y in zip(("o", "dq", "dk", "dv", "dlog_f"), exact, cpu, cuda):
            allowed = 2 * (x - e).abs().max() + 8 * 2**-23 * e.abs().max()
            case(f"float32 {B}x{Tq}/{Tk}x{H}/{Hk}x{D} {options} {name}", (y - e).abs().max() <= allowed)


def raises(function, *words):
    try:
        function()
        torch.cuda.synchronize()
        return False
    except RuntimeError as error:
        return all(w in str(error) for w in words)


def refusals(build):
    q = torch.randn(1, 70, 2, 64, device="cuda", dtype=torch.bfloat16)
    f = -torch.rand(1, 70, 2, device="cuda")
    attend = torch.ops.fox.forgetting_attn
    case("float64 is refused with what is supported",
         raises(lambda: attend(q.double(), q.double(), q.double(), f.double()), "Double"))
    case("a head size of 20 is refused", raises(lambda: attend(q[..., :20], q[..., :20], q[..., :20], f), "20"))
    for bad in (1e-4, float("nan")):
        g = f.clone()
        g[0, 33, 1] = bad
        o = attend(q, q, q, g)[0]
        case(f"a gate of {bad} gives NaN from there on", o[0, 33:, 1].isnan().all() and not o[0, :, 0].isnan().any())
        torch.cuda.synchronize()
        case(f"a gate of {bad} stops the next call", raises(lambda: attend(q, q, q, f), "[0, 33, 1]"))
        case("the call after that runs", not attend(q, q, q, f)[0].isnan().any())
    script = ("import sys; sys.path.insert(0, 'tools/gpu'); import check_attention_ops as c, torch; c.load(sys.argv[1]);"
              "q = torch.randn(1, 70, 2, 64, device='cuda', dtype=torch.bfloat16); f = torch.full((1, 70, 2), 0.5, device='cuda');"
              "sys.exit(0 if c.raises(lambda: torch.ops.fox.forgetting_attn(q, q, q, f), 'this call') else 1)")
    case("FOX_SYNCHRONOUS=1 stops the call itself",
         subprocess.run([sys.executable, "-c", script, build], env={**os.environ, "FOX_SYNCHRONOUS": "1"}).returncode == 0)


def pruning_of_nothing():
    q, k, v = (torch.randn(2, 3000, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    f = F.logsigmoid(torch.randn(2, 3000, 3, device="cuda") + 4)
    for bound in (None, torch.full((3,), 20.0, device="cuda")):
        dense, pruned = (torch.ops.fox.forgetting_attn(q, k, v, f, logit_bound=bound, log_pruning_tolerance=tolerance)
                         for tolerance in (None, -math.inf))
        case(f"a tolerance of 0 is the dense call bit for bit, bound {'given' if bound is not None else 'not given'}",
             torch.equal(dense[0], pruned[0]) and torch.equal(dense[1], pruned[1]))


def decoding():
    fox = torch.ops.fox
    for lengths, Tq, H, Hk, D, window in [([300, 1, 64, 1025, 0], 1, 4, 4, 64, None), ([130, 2000], 3, 8, 2, 128, None),
                                          ([700, 20], 8, 4, 1, 64, 100)]:
        B, most = len(lengths), max(lengths)
        blocks = (most + 63) // 64
        q, k, v = torch.randn(B, Tq, H, D), torch.randn(B, most, Hk, D), torch.randn(B, most, Hk, D)
        f, length = F.logsigmoid(torch.randn(B, most, H) * 2 + 1), torch.tensor(lengths, dtype=torch.int32)
        place = torch.randperm(B * Hk * blocks).to(torch.int32).view(B, Hk, blocks)

        def run(dtype, device, paged):
            r, block = torch.zeros(B, H, blocks * 64, device=device), torch.zeros(B, H, blocks, 2, device=device)
            for b, n in enumerate(lengths):  # a prompt and five steps
                for start, end in [(0, max(n - 5, 0))] + [(t, t + 1) for t in range(max(n - 5, 0), n)]:
                    fox.append_gate_prefixes(r[b:b + 1], block[b:b + 1], f[b:b + 1, start:end].to(device),
                                             torch.tensor([end], dtype=torch.int32, device=device))
            x, y = k, v
            if paged:
                x, y = (torch.zeros(B * Hk * blocks, 64, D) for _ in range(2))
                for source, pool in ((k, x), (v, y)):
                    rows = F.pad(source, (0, 0, 0, 0, 0, blocks * 64 - most)).permute(0, 2, 1, 3).reshape(B, Hk, blocks, 64, D)
                    pool[place.flatten().long()] = rows.reshape(-1, 64, D)
            o, lse = fox.forgetting_decode(q.to(device, dtype), x.to(device, dtype), y.to(device, dtype), length.to(device),
                                           most, r, block, place.to(device) if paged else None, window=window)
            return o.double().cpu(), lse.double().cpu()

        exact, exact_lse = run(torch.float64, "cpu", False)
        near, _ = run(torch.bfloat16, "cpu", False)
        for paged in (False, True):
            o, lse = run(torch.bfloat16, "cuda", paged)
            allowed = 2 * (near - exact).abs().max() + 2**-8 * exact.abs().max()
            seen = exact_lse != -torch.inf
            case(f"decoding {lengths} x {Tq} {H}/{Hk}x{D} window {window} paged {paged}",
                 (o - exact).abs().max() <= allowed and (lse == -torch.inf).equal(~seen)
                 and (lse - exact_lse)[seen].abs().max() < 0.03)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    build = os.path.abspath(arguments.build)
    load(build)
    torch.manual_seed(0)
    for part in (float32, lambda: refusals(build), pruning_of_nothing, decoding):
        try:
            part()
        except Exception as error:  # the rest still runs
            case(f"{getattr(part, '__name__', 'part')}: {str(error)[:300]}", False)
    failed = sum(not r["ok"] for r in RESULTS)
    print(f"attention operators: {len(RESULTS) - failed} of {len(RESULTS)} cases passed", flush=True)
    if arguments.out:
        with open(arguments.out, "w") as out:
            json.dump(RESULTS, out, indent=0)
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
