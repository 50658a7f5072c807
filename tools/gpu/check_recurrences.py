#!/usr/bin/env python3
"""The linear recurrences (mamba2, hgrn2, delta_net, mamba) on CUDA against float64, and how long they take.

usage: tools/gpu/check_recurrences.py BUILD [OPERATOR ...] [--quick] [--out DIR]
       BUILD holds libfox.so and libfox_cuda.so

A case passes if, for the output, the last state and every gradient, err(CUDA) <= 2 err(naive) + a rounding, both against
float64, in the largest element and in the L2 norm. Naive in bf16: token by token in float32, operands of products (the
state that is read, what is written) rounded to bf16, as in any chunked form on tensor cores. Other dtypes have no kernel
but the CPU's composition: naive is that on the CPU, and sums in another order are allowed 8 roundings.
Prints one line a failure and a count; with --out writes recurrences_check.json and recurrences_bench.jsonl there.
"""

import argparse
import json
import os
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_ops import EPS, load  # noqa: E402

# One H200, B 1, T 16384, 760M shapes, ms forward and backward of the Triton peers.
TARGETS = {"mamba2": (0.78, 2.63), "hgrn2": (0.91, 2.46), "delta_net": (1.09, 1.53), "mamba": (None, None)}


def rounded(x):
    """As an operand of a bf16 product: value and gradient rounded."""
    return x.to(torch.bfloat16).float() if x.dtype == torch.float32 else x


def naive(name, x, state, start_of):
    """Token by token; `start_of(t)`: rows (B,) that forget everything before token t. float32 or float64."""
    out, S = [], state
    for t in range(x[0].shape[1]):
        S = S * (~start_of(t)).to(S.dtype).view(-1, *[1] * (S.dim() - 1))
        if name == "hgrn2":
            q, k, v, g = (y[:, t] for y in x)
            S = g.exp()[..., None] * S + rounded(k)[..., None] * rounded(v)[..., None, :]
            out.append((rounded(S) * rounded(q)[..., None]).sum(-2) * q.shape[-1] ** -0.5)
        elif name == "delta_net":
            q, k, v, beta = (y[:, t] for y in x)
            w = rounded(beta[..., None] * (v - (rounded(S) * k[..., None]).sum(-2)))
            S = S + k[..., None] * w[..., None, :]
            out.append((rounded(S) * rounded(q)[..., None]).sum(-2) * q.shape[-1] ** -0.5)
        elif name == "mamba2":
            u, dt, b, c = x[0][:, t], x[1][:, t], x[3][:, t], x[4][:, t]
            S = (dt * x[2]).exp()[..., None, None] * S + rounded(dt[..., None] * u)[..., None] * rounded(b)[:, None, None]
            out.append((rounded(S) * rounded(c)[:, None, None]).sum(-1) + x[5][:, None] * u)
        else:
            u, dt, b, c = x[0][:, t], x[1][:, t], x[3][:, t], x[4][:, t]
            S = (dt[..., None] * x[2]).exp() * S + (dt * u)[..., None] * b[:, None]
            out.append((S * c[:, None]).sum(-1) + x[5] * u)
    return torch.stack(out, 1), S


def inputs(name, B, T, H, D, mean=0.0):
    """Tensors of a call and the state's shape. bf16 ones are views of a packed projection, as in the layers."""
    def packed(*widths):
        return torch.randn(B, T, sum(widths) + 8).split([*widths, 8], -1)[:-1]

    if name == "mamba2":
        x, b, c = packed(H * 64, D, D)
        return [x.unflatten(-1, (H, 64)), F.softplus(torch.randn(B, T, H) * 2 - 2 + mean), -torch.linspace(1, 3, H), b, c,
                torch.randn(H)], (B, H, 64, D)
    if name == "mamba":
        x, b, c = packed(H * D, 16, 16)
        return [x, F.softplus(torch.randn(B, T, H * D) * 2 - 2 + mean), -torch.linspace(0.5, 16, 16).repeat(H * D, 1), b, c,
                torch.randn(H * D)], (B, H * D, 16)
    q, k, v = (y.unflatten(-1, (H, D)) for y in packed(H * D, H * D, H * D))
    if name == "hgrn2":
        log_g = F.logsigmoid(torch.randn(B, T, H, D) * 2 + 2 + mean)
        return [q, 1 - log_g.exp(), v, log_g], (B, H, D, D)
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.sigmoid(torch.randn(B, T, H) * 2 + mean)], (B, H, D, D)


FLOAT32 = {"mamba2": (1, 2, 5), "mamba": (1, 2, 5), "hgrn2": (3,), "delta_net": (3,)}  # whatever the rest is


def cases(names, quick):
    for name in names:
        sizes = (64, 50) if name == "mamba" else (128, 64, 32)
        # Of the matrix products' three sizes the last has no kernel.
        for D, lengths in zip(sizes, [(65, 200)] if quick else [(2, 63, 64, 65, 200), (65, 200), (65,)]):
            for T in lengths:
                yield name, (2, T, 3, D), {}
        D = sizes[0]
        yield name, (1, 200, 9, D), {"mean": -6.0}
        yield name, (1, 200, 2, D), {"mean": 6.0}
        yield name, (1, 333, 2, D), {"cu_seqlens": [0, 1, 64, 64, 70, 199, 333]}
        yield name, (3, 150, 2, D), {"seq_start": [0, 70, 149], "no_state": True}
        yield name, (2, 150, 2, D), {"no_state": True}
        if name == "delta_net":  # a chain of more chunks than are in flight, and one of many sequences
            yield name, (1, 700, 2, D), {}
            yield name, (1, 700, 2, D), {"cu_seqlens": [0, 320, 321, 600, 700]}
            yield name, (12, 200, 2, D), {}


def run(function, tensors, state, grads):
    """Output, last state and gradients, as float64 on the CPU. Strides survive: they are part of the case."""
    leaves = [t.detach().requires_grad_() for t in tensors + ([state] if state is not None else [])]
    o, last = function(leaves[:len(tensors)], leaves[len(tensors)] if state is not None else None)
    torch.autograd.backward([o, last], [g.to(o.device, t.dtype) for g, t in zip(grads, (o, last))])
    return [t.double().cpu() for t in [o.detach(), last.detach()] + [t.grad for t in leaves]]


def check_case(name, shape, options, dtype):
    options = dict(options)
    tensors, state_shape = inputs(name, *shape, mean=options.pop("mean", 0.0))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [t.to(wide if i in FLOAT32[name] else dtype) for i, t in enumerate(tensors)]
    cu, start = options.get("cu_seqlens"), options.get("seq_start")
    state = None if cu or "no_state" in options else torch.randn(state_shape, dtype=wide)
    grads = [torch.randn(tensors[2 if name in ("hgrn2", "delta_net") else 0].shape), torch.randn(state_shape) * 0.1]
    grads = [grads[0].to(dtype), grads[1]]
    T = shape[1]
    if start:  # whatever stands in the padding
        pad = torch.arange(T) < torch.tensor(start)[:, None]
        grads[0] = grads[0].masked_fill(pad.view(*pad.shape, *[1] * (grads[0].dim() - 2)), 0)
    op = getattr(torch.ops.fox, name)

    def fox_op(x, s):
        extra = {key: torch.tensor(value, device=x[0].device) for key, value in options.items() if key != "no_state"}
        return op(*x, initial_state=s, **extra)

    def reference(x, s):
        def start_of(t):
            starts = [bool(cu) and t in cu] * shape[0]
            return torch.tensor([a or (bool(start) and t == start[b]) for b, a in enumerate(starts)], device=x[0].device)
        if s is None:
            s = torch.zeros(state_shape, dtype=x[0].dtype, device=x[0].device)
        return naive(name, x, s, start_of)

    on_gpu, state_on_gpu = [t.cuda() for t in tensors], state.cuda() if state is not None else None
    exact = run(reference, [t.double() for t in on_gpu], state_on_gpu.double() if state is not None else None, grads)
    if dtype == torch.bfloat16:
        same = run(reference, [t.float() for t in on_gpu], state_on_gpu, grads)
    else:
        same = run(fox_op, tensors, state, grads)
    cuda = run(fox_op, on_gpu, state_on_gpu, grads)
    failed, worst = [], 0.0
    names = ["o", "state"] + [f"grad {i}" for i in range(len(exact) - 2)]
    for what, e, o, c in zip(names, exact, same, cuda):
        if start and what.startswith("grad") and e.dim() > 1 and e.shape[1] == T:
            keep = ~pad.view(*pad.shape, *[1] * (e.dim() - 2))
            e, o, c = e * keep, o * keep, c * keep
        if start and what == "o":
            keep = ~pad.view(*pad.shape, *[1] * (e.dim() - 2))
            e, o, c = torch.where(keep, e, 0), torch.where(keep, o, 0), torch.where(keep, c, 0)
        rounding = (4 if dtype == torch.bfloat16 else 16) * EPS[dtype] * e.abs().max().item() + 1e-30
        error, allowed = (c - e).abs().max().item(), 2 * (o - e).abs().max().item() + rounding
        slack = 1 if dtype == torch.bfloat16 else 8
        norm, norm_allowed = (c - e).norm().item(), 2 * (o - e).norm().item() + slack * EPS[dtype] * e.norm().item()
        worst = max(worst, error / (allowed + 1e-300))
        if not (error <= allowed and norm <= norm_allowed):
            failed.append(f"{name} {shape} {options} {dtype} {what}: error {error:.3g}, allowed {allowed:.3g}; "
                          f"norm {norm:.3g}, allowed {norm_allowed:.3g}")
    return len(names), failed, worst


def check(names, quick):
    torch.manual_seed(0)
    ran, failed, worst = 0, [], {}
    for name, shape, options in cases(names, quick):
        dtypes = [torch.bfloat16] + ([] if quick or shape[1] > 65 else [torch.float32, torch.float64])
        for dtype in dtypes:
            count, bad, ratio = check_case(name, shape, options, dtype)
            ran += count
            failed += bad
            key = f"{name} {str(dtype)[6:]}"
            worst[key] = max(worst.get(key, 0.0), ratio)
    print("\n".join(failed))
    print("largest error / allowed:", {key: round(value, 2) for key, value in worst.items()})
    print(f"recurrences on CUDA: {ran} comparisons, {len(failed)} failed")
    return {"comparisons": ran, "failed": failed, "largest_error_of_allowed": worst}


def milliseconds(function, repeat=9, calls=5):
    """Median of what a call takes; several calls a measurement, so that what the host takes to launch does not enter."""
    times = []
    for i in range(repeat + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / calls)
    return sorted(times)[len(times) // 2]


def bench_case(name, B, T):
    H = {"mamba2": 48, "mamba": 24}.get(name, 12)
    with torch.device("cuda"):  # a CPU takes seconds to draw as many numbers
        tensors, _ = inputs(name, B, T, H, 128)
    tensors = [t.to(torch.float32 if i in FLOAT32[name] else torch.bfloat16) for i, t in enumerate(tensors)]
    op = getattr(torch.ops.fox, name)
    leaves = [t.detach().requires_grad_() for t in tensors]
    o, _ = op(*leaves)
    grad = torch.randn_like(o)
    forward = milliseconds(lambda: op(*tensors))
    backward = milliseconds(lambda: torch.autograd.grad(o, leaves, grad, retain_graph=True))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(op(*leaves)[0], leaves, grad)
    target = TARGETS[name] if (B, T) == (1, 16384) else (None, None)
    return {"op": name, "B": B, "T": T, "H": H, "dtype": "bfloat16", "forward_ms": forward, "backward_ms": backward,
            "target_ms": target, "ns_a_token": 1e6 * (forward + backward) / (B * T),
            "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def bench(names, quick):
    lines = []
    for name in names:
        for B, T in [(1, 16384)] if quick else [(1, 16384), (32, 2048), (8, 8192), (2, 32768), (1, 65536)]:
            lines.append(bench_case(name, B, T))
            print(json.dumps(lines[-1]))
            torch.cuda.empty_cache()
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    load(os.path.abspath(arguments.build))
    names = arguments.operators or list(TARGETS)
    result = check(names, arguments.quick)
    if arguments.out:
        with open(os.path.join(arguments.out, "recurrences_check.json"), "w") as f:
            json.dump(result, f, indent=1)
    lines = bench(names, arguments.quick)
    if arguments.out:
        with open(os.path.join(arguments.out, "recurrences_bench.jsonl"), "w") as f:
            f.writelines(json.dumps({**line, "device": torch.cuda.get_device_name()}) + "\n" for line in lines)
    return 0 if not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
