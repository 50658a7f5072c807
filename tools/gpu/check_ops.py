#!/usr/bin/env python3
"""The operators' CUDA sides against their CPU sides: same cases, other device; then the memory-bound ones' bandwidth.

usage: tools/gpu/check_ops.py BUILD [--out DIR]     BUILD holds libfox.so and libfox_cuda.so

A case passes if err(CUDA) <= 2 err(CPU in the same dtype) + a rounding of the output, both against float64 on the CPU.
Prints one line a failure and a count; with --out writes ops_check.json and ops_bench.jsonl there.
"""

import argparse
import ctypes
import json
import os
import sys

import torch
import torch.nn.functional as F

EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23, torch.float64: 2**-52}


def load(build):
    for name in ("libfox.so", "libfox_cuda.so"):  # the second finds the first's symbols because they are global
        ctypes.CDLL(os.path.join(build, name), mode=ctypes.RTLD_GLOBAL)


def strided(*shape):
    """A view of a packed projection: every row is a slice of a longer one."""
    return torch.randn(*shape[:-1], shape[-1] * 3)[..., shape[-1]: 2 * shape[-1]]


def cases():
    """name, function of the floating tensors, those tensors (float32 on the CPU)."""
    fox = torch.ops.fox
    for shape, groups, weight in [((7, 1536), 1, 1536), ((3, 5, 1536), 24, 1536), ((9, 1536), 12, 128), ((4, 768), 12, 64),
                                  ((33, 96), 4, 24), ((33, 96), 4, 96), ((5, 10), 1, 10), ((2, 20000), 1, 20000), ((6, 512), 1, 0)]:
        x, w = strided(*shape), torch.randn(weight) if weight else None
        yield f"rms_norm {shape} groups {groups} weight {weight}", \
            lambda x, *w, g=groups: fox.rms_norm(x, w[0] if w else None, 1e-5, g), [x] + ([w] if weight else [])
    for shape in [(7, 64), (5, 3, 4096), (3, 14), (2, 7168)]:
        yield f"swiglu {shape}", fox.swiglu, [strided(*shape)]
    for shape in [(2, 65, 24), (1, 1, 4), (3, 1000, 12)]:
        yield f"log_sigmoid_gate {shape}", fox.log_sigmoid_gate, [torch.randn(shape) * 4, torch.randn(shape[-1])]
    for shape in [(2, 9, 3, 64), (1, 130, 4, 24), (2, 5, 2, 6), (1, 33, 2, 128)]:
        for offset in (0, 100000):
            yield f"rotary {shape} offset {offset}", lambda x, o=offset: fox.rotary(x, 5e5, o), [strided(*shape)]
    for shape in [(2, 9, 3, 64), (1, 130, 4, 24), (2, 5, 2, 6), (1, 33, 2, 128), (3, 1, 2, 8)]:
        B, T, H, D = shape
        x, alpha, prev = strided(*shape), torch.rand(B, T, H), torch.randn(B, H, D)
        yield f"token_shift {shape}", lambda x, a: fox.token_shift(x, a), [x, alpha]
        yield f"token_shift {shape} prev", lambda x, a, p: fox.token_shift(x, a, p), [x, alpha, prev]
        start = torch.arange(B) % T
        yield f"token_shift {shape} seq_start", \
            lambda x, a, s=start: fox.token_shift(x, a, None, None, s.to(x.device)), [x, alpha]
        if B == 1:
            cu = torch.tensor([0, 1, T // 2, T])
            yield f"token_shift {shape} cu_seqlens", \
                lambda x, a, c=cu: fox.token_shift(x, a, None, c.to(x.device)), [x, alpha]
    for N, C, V in [(50, 64, 1000), (300, 96, 1025), (17, 32, 50257)]:
        labels = torch.randint(0, V, (N,))
        labels[::5] = -100
        yield f"linear_cross_entropy {N}x{C}x{V}", \
            lambda x, w, l=labels: fox.linear_cross_entropy(x, w, l.to(x.device))[0], [torch.randn(N, C), torch.randn(V, C) * C**-0.5]
    for B, Tq, Tk, H, Hk, D, extra in [(2, 130, 130, 4, 4, 64, {}), (1, 257, 257, 4, 2, 128, {}), (1, 5, 133, 2, 2, 64, {}),
                                       (1, 200, 200, 2, 2, 64, {"window": 64}), (2, 100, 100, 3, 3, 80, {})]:
        q, k, v = strided(B, Tq, H, D), strided(B, Tk, Hk, D), strided(B, Tk, Hk, D)
        log_f = F.logsigmoid(torch.randn(B, Tk, H) * 2 + 1)
        yield f"forgetting_attn {B}x{Tq}/{Tk}x{H}/{Hk}x{D} {extra}", \
            lambda q, k, v, f, e=extra: fox.forgetting_attn(q, k, v, f.double() if q.dtype == torch.float64 else f.float(), **e)[0], \
            [q, k, v, log_f]


def run(function, tensors, grad):
    """Output and gradients, as float64 on the CPU."""
    leaves = [t.detach().clone().as_strided(t.size(), t.stride()) if t.is_contiguous() else t.detach() for t in tensors]
    leaves = [t.requires_grad_() for t in leaves]
    out = function(*leaves)
    out.backward(grad.to(out.device, out.dtype) if out.dim() else torch.ones_like(out))
    return [t.double().cpu() for t in [out.detach()] + [t.grad for t in leaves]]


def check(out_dir):
    torch.manual_seed(0)
    ran, failed = 0, []
    for name, function, tensors in cases():
        dtypes = [torch.bfloat16, torch.float16] + ([] if "forgetting" in name else [torch.float32, torch.float64])
        for dtype in dtypes:
            # Values that all dtypes agree on, and a gate's float32 whatever the rest is.
            keep = [i == 3 and "forgetting" in name for i in range(len(tensors))]
            rounded = [t if k else t.to(dtype) for t, k in zip(tensors, keep)]
            exact = run(function, [t.double() for t in rounded], grad := torch.randn(function(*[t.double() for t in rounded]).shape).to(dtype).double())
            own = run(function, rounded, grad)
            cuda = run(function, [t.cuda() for t in rounded], grad)
            for what, e, o, c in zip(["out"] + [f"grad {i}" for i in range(len(tensors))], exact, own, cuda):
                ran += 1
                size = e.abs().max().item() + 1e-30
                error, allowed = (c - e).abs().max().item(), 2 * (o - e).abs().max().item() + 4 * EPS[dtype] * size
                if not error <= allowed:
                    failed.append(f"{name} {dtype} {what}: error {error:.3g}, allowed {allowed:.3g}")
    print("\n".join(failed))
    print(f"operators on CUDA: {ran} comparisons, {len(failed)} failed")
    if out_dir:
        with open(os.path.join(out_dir, "ops_check.json"), "w") as f:
            json.dump({"comparisons": ran, "failed": failed}, f, indent=1)
    return not failed


def milliseconds(function, repeat=20):
    times = []
    for i in range(repeat + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def bench(out_dir):
    fox, T, C, H, D = torch.ops.fox, 16384, 1536, 24, 64
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    source, target = torch.randn(2**29, **bf16), torch.empty(2**29, **bf16)
    copy = 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e9
    del source, target
    lines = [{"op": "copy", "tb_per_s": copy}]

    def add(op, bytes_moved, function):
        ms = milliseconds(function)
        lines.append({"op": op, "ms": ms, "tb_per_s": bytes_moved / ms / 1e9, "ratio_to_copy": bytes_moved / ms / 1e9 / copy})

    # Four times the tokens of a context, so that no operand stays in the cache between repetitions.
    n = 4 * T * C * 2
    x, g, w = torch.randn(4 * T, C, **bf16), torch.randn(4 * T, C, **bf16), torch.randn(C, device="cuda")
    add("rms_norm", 2 * n, lambda: fox.rms_norm(x, w, 1e-6, 1))
    add("rms_norm_backward", 3 * n, lambda: fox.rms_norm_backward(g, x, w, 1e-6, 1))
    wd = torch.randn(D, device="cuda")
    add("rms_norm per head", 2 * n, lambda: fox.rms_norm(x, wd, 1e-6, H))
    add("rms_norm_backward per head", 3 * n, lambda: fox.rms_norm_backward(g, x, wd, 1e-6, H))
    y, dy = torch.randn(4 * T, 2 * 4096, **bf16), torch.randn(4 * T, 4096, **bf16)
    m = 4 * T * 4096 * 2
    add("swiglu", 3 * m, lambda: fox.swiglu(y))
    add("swiglu_backward", 5 * m, lambda: fox.swiglu_backward(dy, y))
    q, a, dq = x.view(1, 4 * T, H, D), torch.rand(1, 4 * T, H, **bf16), g.view(1, 4 * T, H, D)
    add("token_shift", 2 * n, lambda: fox.token_shift(q, a))
    add("token_shift_backward", 3 * n, lambda: fox.token_shift_backward(dq, q, a, None, None, None))
    add("rotary", 2 * n, lambda: fox.rotary(q, 5e5, 0))
    del x, g, y, dy, q, dq
    hidden, head = torch.randn(T, C, **bf16), torch.randn(50304, C, **bf16) * 0.02
    labels = torch.randint(0, 50304, (T,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = milliseconds(lambda: fox.linear_cross_entropy(hidden, head, labels, None, True, True))
    lines.append({"op": "linear_cross_entropy forward + backward 16384 x 1536 x 50304", "ms": ms,
                  "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30})
    for line in lines:
        print(json.dumps(line))
    if out_dir:
        with open(os.path.join(out_dir, "ops_bench.jsonl"), "w") as f:
            f.writelines(json.dumps({**line, "device": torch.cuda.get_device_name()}) + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    load(os.path.abspath(arguments.build))
    good = check(arguments.out)
    bench(arguments.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
