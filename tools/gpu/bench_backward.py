"""Times the CUDA backward pass beside cuDNN's plain attention, interleaved, on random data. One JSON object a line.

usage: bench_backward.py [--cases D64T4096,D128T16384] [--repeats N] [--library LABEL=PATH ...] [--only off,log_spaced]
                         [--profile] [--out FILE.jsonl]
TFLOP/s are dense-equivalent: 5 B H T^2 D a call, causal. A call is everything from the gates to the gradients.
"""

import argparse
import json
import math
import re
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fox_backward as fb
import fox_kernels as fk
from bench_forward import STANDARD, timed


def cudnn_backward(q, k, v, d_o):
    qt, kt, vt = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=True)
    d_o = d_o.transpose(1, 2)
    return lambda: torch.autograd.grad(o, (qt, kt, vt), d_o, retain_graph=True)


def prepare(D, T, libraries, only):
    B, H = max(1, 32768 // T), 1536 // D
    q, k = fk.normalised(B, T, H, D), fk.normalised(B, T, H, D)
    v, d_o = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    f = fk.log_spaced_gates(B, T, H)
    bound = torch.full((H,), math.sqrt(D), device="cuda")  # RMS-normalised q and k, unit scale
    variants = {"off": {}, "log_spaced": dict(log_f=f),
                "log_spaced_pruned": dict(log_f=f, log_tolerance=-10.0, logit_bound=bound),
                "log_spaced_deterministic": dict(log_f=f, deterministic=True)}
    calls = {("cudnn", "off"): cudnn_backward(q, k, v, d_o)}
    for label, lib in libraries.items():
        for name in only:
            call = fb.Backward(lib, q, k, v, d_o, **variants[name])
            call.run()
            calls[(label, name)] = call.run_backward
    return B, H, calls


def bench(D, T, libraries, repeats, only):
    B, H, calls = prepare(D, T, libraries, only)
    flops = 5 * B * H * T * T * D
    inner = max(1, int(6e-3 / (flops / 500e12)))
    for call in calls.values():
        timed(call, inner)
    events = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            events[key].append(timed(call, inner))
    torch.cuda.synchronize()
    ms = {key: sorted(b.elapsed_time(e) / inner for b, e in pairs) for key, pairs in events.items()}
    base = statistics.median(ms[("cudnn", "off")])
    for (kernel, name), times in ms.items():
        median = statistics.median(times)
        yield dict(op="forgetting_attn", direction="backward", gates=name.split("_pruned")[0].split("_det")[0],
                   pruned="pruned" in name, deterministic="deterministic" in name, kernel=kernel, dtype="bf16", B=B, T=T,
                   H=H, D=D, ms=round(median, 4), ms_spread=round(times[-1] - times[0], 4),
                   tflops=round(flops / median / 1e9, 1), ratio=round(base / median, 3))


def profile(D, T, libraries, only):
    _, _, calls = prepare(D, T, libraries, only)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for call in calls.values():
            for _ in range(3):
                call()
        torch.cuda.synchronize()
    for e in sorted(p.key_averages(), key=lambda e: -e.device_time):
        if e.device_time > 3:
            print(f"    {e.device_time:9.1f} us x{e.count} {e.key[:110]}")


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--cases", default=STANDARD)
    args.add_argument("--repeats", type=int, default=7)
    args.add_argument("--library", action="append", default=[])
    args.add_argument("--only", default="off,log_spaced,log_spaced_pruned")
    args.add_argument("--profile", action="store_true")
    args.add_argument("--out")
    args = args.parse_args()
    libraries = dict(pair.split("=") for pair in args.library)
    libraries = {k: fk.load(p) for k, p in libraries.items()} or {"fox": fk.load()}
    out = open(args.out, "w") if args.out else None
    for case in args.cases.split(","):
        D, T = map(int, re.match(r"D(\d+)T(\d+)", case).groups())
        torch.manual_seed(0)
        for row in bench(D, T, libraries, args.repeats, args.only.split(",")):
            if out:
                out.write(json.dumps(row) + "\n")
            name = row["gates"] + " pruned" * row["pruned"] + " deterministic" * row["deterministic"]
            print(f"D{D} T{T:6d} {row['kernel']:>8} {name:<24} {row['ms']:9.3f} ms ±{row['ms_spread']:.3f} "
                  f"{row['tflops']:7.1f} TFLOP/s ratio {row['ratio']:.3f}", flush=True)
        if args.profile:
            profile(D, T, libraries, args.only.split(","))


if __name__ == "__main__":
    main()
