"""Times the CUDA forward pass beside cuDNN's plain attention, interleaved, on random data. One JSON object a line.

usage: bench_forward.py [--cases D64T4096,D128T16384] [--repeats N] [--library LABEL=PATH ...] [--out FILE.jsonl]
TFLOP/s are dense-equivalent: 2 B H T^2 D a call, causal. "bounded": the kernel is told the bound of the logits that
follows from RMS-normalised q and k, and needs no running maximum. Ratios are medians over the rounds, since the clock
drifts. "short" gates: decay times up to T / 16.
"""

import argparse
import json
import math
import re
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fox_kernels as fk

STANDARD = "D64T4096,D64T16384,D64T65536,D128T4096,D128T16384,D128T65536"


def timed(call, inner):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    return begin, end


def bench(D, T, libraries, repeats, only):
    B, H = max(1, 32768 // T), 1536 // D
    q, k = fk.normalised(B, T, H, D), fk.normalised(B, T, H, D)
    v = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    f, short = fk.log_spaced_gates(B, T, H), fk.log_spaced_gates(B, T, H, longest=T // 16)
    bound = torch.full((H,), 1.01 * math.sqrt(D), device="cuda")  # RMS-normalised q and k, unit scale, rounded
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=True)

    calls = {("cudnn", "off", False, False): cudnn}
    prepared = {}
    for label, lib in libraries.items():
        small = dict(logit_bound=bound)
        for key, kwargs in {("off", False, False): {}, ("off", False, True): small,
                            ("ones", False, False): dict(log_f=torch.zeros_like(f)),
                            ("log_spaced", False, False): dict(log_f=f),
                            ("log_spaced", False, True): dict(log_f=f, **small),
                            ("log_spaced", True, True): dict(log_f=f, log_tolerance=-10.0, **small),
                            ("short", True, True): dict(log_f=short, log_tolerance=-10.0, **small)}.items():
            name = key[0] + ("_pruned" if key[1] else "_bounded" if key[2] else "")
            if only and name not in only:
                continue
            prepared[(label,) + key] = c = fk.Forward(lib, q, k, v, **kwargs)
            calls[(label,) + key] = c.run
    flops = 2 * B * H * T * T * D
    inner = max(1, int(4e-3 / (flops / 500e12)))
    start = time.time()
    while time.time() - start < 1.0:  # until the clock has settled under this load
        for call in calls.values():
            timed(call, inner)
        torch.cuda.synchronize()
    events = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            events[key].append(timed(call, inner))
    torch.cuda.synchronize()
    ms = {key: [b.elapsed_time(e) / inner for b, e in pairs] for key, pairs in events.items()}
    peer = ms[("cudnn", "off", False, False)]
    blocks = (T // 64) * (T // 64 + 1) // 2
    for key, times in ms.items():
        kept = prepared[key].kept_blocks().float().mean().item() / blocks if key in prepared else 1.0
        median = statistics.median(times)
        ratio = statistics.median(x / y for x, y in zip(peer, times))
        yield dict(op="forgetting_attn", direction="forward", gates=key[1], pruned=key[2], bounded=key[3],
                   kernel=key[0], dtype="bf16", B=B, T=T, H=H, D=D, ms=round(median, 4), ms_spread=round(max(times) - min(times), 4),
                   tflops=round(flops / median / 1e9, 1), ratio=round(ratio, 3),
                   kept=round(kept, 3))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--cases", default=STANDARD)
    args.add_argument("--repeats", type=int, default=7)
    args.add_argument("--library", action="append", default=[])
    args.add_argument("--only", default="")
    args.add_argument("--out")
    args = args.parse_args()
    libraries = dict(pair.split("=") for pair in args.library)
    libraries = {k: fk.load(p) for k, p in libraries.items()} or {"fox": fk.load()}
    out = open(args.out, "w") if args.out else None
    for case in args.cases.split(","):
        D, T = map(int, re.match(r"D(\d+)T(\d+)", case).groups())
        torch.manual_seed(0)
        for row in bench(D, T, libraries, args.repeats, [x for x in args.only.split(",") if x]):
            if out:
                out.write(json.dumps(row) + "\n")
            print(f"D{D} T{T:6d} {row['kernel']:>8} {row['gates']:>10}{' pruned ' if row['pruned'] else ' bounded' if row['bounded'] else '        '} "
                  f"{row['ms']:9.3f} ms ±{row['ms_spread']:.3f} {row['tflops']:7.1f} TFLOP/s ratio {row['ratio']:.3f} "
                  f"kept {row['kept']:.3f}", flush=True)


if __name__ == "__main__":
    main()
