#!/usr/bin/env python3
"""The operators' CUDA sides against naive formulas in the same precision: one row of a sum after another.

usage: tools/gpu/check_ops.py BUILD [NAME ...] [--out DIR]     BUILD holds libfox.so and libfox_cuda.so; NAMEs: only
the cases whose names begin so

A case passes if err(CUDA) <= 2 err(naive in the same dtype) + 2 roundings of the output + 1e-6 of float32 arithmetic on
values of order 1 (what is left where a sum cancels), both against the operator's CPU side in float64, results and gradients
alike. In float64 nothing is more exact to measure against: there both agree to 1e-12. (The rule of tests/support/op_check.h.)
Naive for 16-bit dtypes computes in float32 and rounds once, as operators do; attention has no naive formula here
(check_forward.py and check_backward.py have), its CPU side stands in.
Prints one line a failure and a count; with --out writes ops_check.json there.
"""

import argparse
import ctypes
import functools
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


# --- naive formulas ---------------------------------------------------------------------------------------------------

class PlainSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        ctx.shape, ctx.dim = x.shape, dim
        return functools.reduce(torch.add, x.unbind(dim))

    @staticmethod
    def backward(ctx, g):
        return g.unsqueeze(ctx.dim).expand(ctx.shape), None


plain_sum = PlainSum.apply


class Shared(torch.autograd.Function):
    """A parameter that every row uses: its gradient is a plain sum over the rows."""

    @staticmethod
    def forward(ctx, w, shape):
        ctx.dims = w.dim()
        return w.expand(shape)

    @staticmethod
    def backward(ctx, g):
        return plain_sum(g.reshape(-1, *g.shape[g.dim() - ctx.dims:]), 0), None


def high(t):
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def naive_rms_norm(x, w, eps, groups):
    g = high(x).unflatten(-1, (groups, -1))
    y = g * torch.rsqrt((plain_sum(g * g, -1) / g.shape[-1]).unsqueeze(-1) + eps)
    if w is not None:
        y = y * Shared.apply(high(w) if w.numel() == g.shape[-1] else high(w).view(groups, -1), g.shape)
    return y.flatten(-2).to(x.dtype)


def naive_swiglu(x):
    g, y = high(x).chunk(2, -1)
    return (g / (1 + torch.exp(-g)) * y).to(x.dtype)


def naive_swiglu_of_two(g, y):
    return naive_swiglu(torch.cat([g, y], -1))


def naive_gate(x, b):
    return F.logsigmoid(high(x) + Shared.apply(high(b), x.shape))


def naive_rotary(x, base, offset):
    T, D = x.shape[1], x.shape[-1]
    inverse = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.outer(torch.arange(offset, offset + T, dtype=torch.float64), inverse)
    cos, sin = (f(angle).to(high(x).dtype)[None, :, None] for f in (torch.cos, torch.sin))
    a, b = high(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def naive_shift(x, alpha, prev=None, begins=None):
    first = torch.zeros_like(x[:, :1]) if prev is None else prev[:, None].to(x.dtype)
    before = high(torch.cat([first, x[:, :-1]], 1))
    if begins is not None:
        before = torch.where(begins[:, :, None, None], 0, before)
    a = high(alpha)[..., None]
    return (a * before + (1 - a) * high(x)).to(x.dtype)


def naive_attn_input(x, shift=None, prev=None, begins=None, weight=None, eps=0.0, base=None, offset=0):
    y = high(x)
    if shift is not None:
        y = naive_shift(y, torch.sigmoid(high(shift)), prev, begins)
    if weight is not None:
        y = naive_rms_norm(y.flatten(2), weight, eps, x.shape[2]).view(x.shape)
    return (y if base is None else naive_rotary(y, base, offset)).to(x.dtype)


def naive_add_rms_norm(x, branch, w, eps):
    total = x + branch if x.dtype == high(x).dtype else (high(x) + high(branch)).to(x.dtype)
    return total, naive_rms_norm(total, w, eps, 1).to(branch.dtype)


def naive_gated_rms_norm(x, gate, w, eps, groups, silu):
    z = high(gate)
    y = naive_rms_norm(high(x), w, eps, groups) / (1 + torch.exp(-z))
    return (y * z if silu else y).to(x.dtype)


def naive_short_conv(x, w, bias=None, before=None, document=None):
    """w (K, C), the current token's tap last; nothing of a token of another document."""
    y, past = high(x), w.shape[0] - 1
    first = torch.zeros(x.shape[0], past, x.shape[2], dtype=y.dtype) if before is None else high(before)
    whole, rows = torch.cat([first, y], 1), [Shared.apply(tap, y.shape) for tap in high(w)]
    z = torch.zeros_like(y) if bias is None else Shared.apply(high(bias), y.shape)
    for back in range(past + 1):
        other = whole[:, past - back: past - back + x.shape[1]]
        if document is not None and back:
            outside = torch.ones(x.shape[1], dtype=torch.bool)
            outside[back:] = document[back:] != document[:-back]
            other = torch.where(outside[:, None], 0, other)
        z = z + rows[past - back] * other
    return (z / (1 + torch.exp(-z))).to(x.dtype)


def naive_hgrn2_gate(logits, lower=None):
    z = high(logits)
    opened, closed = 1 / (1 + torch.exp(-z)), 1 / (1 + torch.exp(z))
    if lower is None:
        return F.logsigmoid(z), closed.to(logits.dtype)
    low = Shared.apply(high(lower), z.shape)
    return torch.log(low + (1 - low) * opened), ((1 - low) * closed).to(logits.dtype)


def naive_time_step(logits, bias):
    x = high(logits) + Shared.apply(high(bias), logits.shape)
    return torch.clamp_min(x, 0) + torch.log1p(torch.exp(-x.abs()))


def naive_cross_entropy(x, w, labels):
    logits = high((x @ w.T).to(x.dtype))
    high_most = logits.detach().amax(1, keepdim=True)
    total = plain_sum(torch.exp(logits - high_most), 1)
    counts = labels != -100
    loss = torch.log(total) + high_most[:, 0] - logits.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return plain_sum(torch.where(counts, loss, 0), 0) / counts.sum()


# --- cases ------------------------------------------------------------------------------------------------------------

def norm_cases(fox):
    for shape, groups, weight in [((7, 1536), 1, 1536), ((3, 5, 1536), 24, 1536), ((9, 1536), 12, 128), ((4, 768), 12, 64),
                                  ((33, 96), 4, 24), ((33, 96), 4, 96), ((5, 10), 1, 10), ((2, 20000), 1, 20000), ((6, 512), 1, 0),
                                  ((1500, 1024), 1, 1024), ((300, 1536), 24, 64), ((5, 8192), 1, 8192)]:
        x, w = strided(*shape), torch.randn(weight) if weight else None
        yield f"rms_norm {shape} groups {groups} weight {weight}", \
            lambda x, *w, g=groups: fox.rms_norm(x, w[0] if w else None, 1e-5, g), \
            lambda x, *w, g=groups: naive_rms_norm(x, w[0] if w else None, 1e-5, g), [x] + ([w] if weight else [])
    for shape in [(1500, 1536), (3, 5, 768), (7, 100), (5, 8192), (2, 20000)]:
        tensors = [strided(*shape), strided(*shape), torch.randn(shape[-1])]
        yield f"add_rms_norm {shape}", lambda x, b, w: fox.add_rms_norm(x, b, w, 1e-5), \
            lambda x, b, w: naive_add_rms_norm(x, b, w, 1e-5), tensors
        yield f"add_rms_norm {shape} stream in float32", lambda x, b, w: fox.add_rms_norm(high(x), b, high(w), 1e-5), \
            lambda x, b, w: naive_add_rms_norm(high(x), b, high(w), 1e-5), tensors
    for shape, groups, weight in [((300, 1536), 24, 1536), ((9, 1536), 12, 128), ((4, 3, 768), 12, 768), ((33, 96), 4, 24), ((5, 96), 1, 96)]:
        for silu in (False, True):
            yield f"gated_rms_norm {shape} groups {groups} weight {weight} silu {silu}", \
                lambda x, z, w, g=groups, s=silu: fox.gated_rms_norm(x, z, w, 1e-5, g, s), \
                lambda x, z, w, g=groups, s=silu: naive_gated_rms_norm(x, z, w, 1e-5, g, s), \
                [strided(*shape), strided(*shape), torch.randn(weight)]


def boundaries(B, T):
    """Keyword arguments of the operators and the mask of document starts at t > 0."""
    yield "", {}, None
    start = torch.arange(B) % T
    yield "seq_start", {"seq_start": start}, (torch.arange(T) == start[:, None]) & (torch.arange(T) > 0)
    if B == 1 and T > 2:
        cu = torch.tensor([0, 1, T // 2, T])
        yield "cu_seqlens", {"cu_seqlens": cu}, (torch.isin(torch.arange(T), cu) & (torch.arange(T) > 0))[None]


def on(device, kwargs):
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in kwargs.items()}


def attn_input_cases(fox):
    shapes = [(2, 9, 3, 64), (1, 130, 4, 24), (2, 5, 2, 6), (1, 33, 2, 128), (3, 1, 2, 8), (1, 77, 24, 64), (2, 20, 24, 256), (1, 21, 3, 80), (2, 6, 2, 5)]
    for shape in shapes:
        B, T, H, D = shape
        x, alpha, prev = strided(*shape), torch.rand(B, T, H), torch.randn(B, H, D)
        packed = torch.randn(B, T, H * D + 8 * H)  # x and the logits as slices of one projection
        x_packed, logits = packed[..., :H * D].view(shape), packed[..., H * D:H * D + H]
        for name, kwargs, begins in boundaries(B, T):
            yield f"token_shift {shape} {name}", lambda x, a, k=kwargs: fox.token_shift(x, a, **on(x.device, k)), \
                lambda x, a, b=begins: naive_shift(x, a, None, b), [x, alpha]
            for weight in (D, H * D):
                yield f"attn_input {shape} shift, norm {weight} {name}", \
                    lambda x, s, w, k=kwargs: fox.attn_input(x, s, norm_weight=w, norm_eps=1e-5, **on(x.device, k)), \
                    lambda x, s, w, b=begins: naive_attn_input(x, s, None, b, w, 1e-5), [x_packed, logits, torch.randn(weight)]
        yield f"token_shift {shape} prev", lambda x, a, p: fox.token_shift(x, a, p), naive_shift, [x, alpha, prev]
        yield f"attn_input {shape} shift after prev", lambda x, s, p: fox.attn_input(x, s, p), naive_attn_input, [x_packed, logits, prev]
        yield f"attn_input {shape} norm", lambda x, w: fox.attn_input(x, norm_weight=w, norm_eps=1e-5), \
            lambda x, w: naive_attn_input(x, weight=w, eps=1e-5), [x, torch.randn(H * D)]
        if D % 2:
            continue
        for offset in (0, 100000):
            yield f"rotary {shape} offset {offset}", lambda x, o=offset: fox.rotary(x, 5e5, o), \
                lambda x, o=offset: naive_rotary(x, 5e5, o), [x]
        yield f"attn_input {shape} rotary", lambda x: fox.attn_input(x, rotary_base=5e5, rotary_offset=7), \
            lambda x: naive_attn_input(x, base=5e5, offset=7), [x_packed]
        yield f"attn_input {shape} norm, rotary", \
            lambda x, w: fox.attn_input(x, norm_weight=w, norm_eps=1e-5, rotary_base=5e5), \
            lambda x, w: naive_attn_input(x, weight=w, eps=1e-5, base=5e5), [x, torch.randn(D)]
        yield f"attn_input {shape} all", \
            lambda x, s, p, w: fox.attn_input(x, s, p, norm_weight=w, norm_eps=1e-5, rotary_base=5e5, rotary_offset=3), \
            lambda x, s, p, w: naive_attn_input(x, s, p, None, w, 1e-5, 5e5, 3), [x_packed, logits, prev, torch.randn(H * D)]


def short_conv_cases(fox):
    for B, T, C, K in [(2, 1, 1, 1), (2, 1, 70, 4), (2, 2, 5, 4), (2, 7, 3, 2), (3, 33, 64, 4), (2, 300, 65, 3),
                       (1, 400, 264, 4), (2, 40, 24, 6)]:
        x, w = torch.randn(B, T, 2 * C + 16)[..., 16:16 + C], torch.randn(C, K).t() / 2
        bias, before = torch.randn(C), torch.randn(B, K - 1, C)
        yield f"short_conv {B}x{T}x{C}, {K} taps", fox.short_conv, naive_short_conv, [x, w]
        yield f"short_conv {B}x{T}x{C}, {K} taps, bias", fox.short_conv, naive_short_conv, [x, w, bias]
        if K > 1:
            yield f"short_conv {B}x{T}x{C}, {K} taps, tokens before", lambda x, w, p: fox.short_conv(x, w, None, p), \
                lambda x, w, p: naive_short_conv(x, w, None, p), [x, w, before]
            yield f"short_conv {B}x{T}x{C}, {K} taps, bias, tokens before", fox.short_conv, naive_short_conv, \
                [x.contiguous(), w.contiguous(), bias, before]
        if B == 1:  # a last token of which only tokens behind the end would make too much
            huge, last = x[:1] / 16, w.clone()
            huge[:, -1], last[-2], last[-1] = 2e37, 40, 5e-38
            yield f"short_conv {T}x{C}, {K} taps, huge at the end", fox.short_conv, naive_short_conv, [huge, last]
        if B == 1 or T == 7:
            cu = torch.tensor([0, 1, 4, 4, T // 2 + 2, T - 1, T])
            document = torch.searchsorted(cu, torch.arange(T), right=True)
            yield f"short_conv {T}x{C}, {K} taps, documents", \
                lambda x, w, b, c=cu: fox.short_conv(x, w, b, cu_seqlens=c.to(x.device)), \
                lambda x, w, b, d=document: naive_short_conv(x, w, b, None, d), [x[:1], w, bias]
    # So many channels that the runs of a GPU's lanes are long enough for their middle, which has no checks.
    yield "short_conv 2x64x33792, 4 taps, bias", fox.short_conv, naive_short_conv, \
        [torch.randn(2, 64, 33792), torch.randn(4, 33792) / 2, torch.randn(33792)]


def cases():
    """name, operator, naive formula, the floating tensors that both take (float32 on the CPU)."""
    fox = torch.ops.fox
    yield from norm_cases(fox)
    yield from attn_input_cases(fox)
    yield from short_conv_cases(fox)
    for shape in [(7, 64), (5, 3, 4096), (3, 14), (2, 7168)]:
        yield f"swiglu {shape}", fox.swiglu, naive_swiglu, [strided(*shape)]
        yield f"swiglu of two {shape}", fox.swiglu_of_two, naive_swiglu_of_two, [strided(*shape), torch.randn(shape)]
    for shape in [(2, 65, 24), (1, 1, 4), (3, 1000, 12)]:
        yield f"log_sigmoid_gate {shape}", fox.log_sigmoid_gate, naive_gate, [torch.randn(shape) * 4, torch.randn(shape[-1])]
    for shape in [(2, 65, 24), (1, 1, 4), (1, 300, 132), (5, 7, 33)]:
        logits = strided(*shape) * 3
        yield f"time_step {shape}", fox.time_step, naive_time_step, [logits, torch.randn(shape[-1])]
        yield f"hgrn2_gate {shape}", fox.hgrn2_gate, naive_hgrn2_gate, [logits]
        yield f"hgrn2_gate {shape}, lower bound", fox.hgrn2_gate, naive_hgrn2_gate, [logits, torch.rand(shape[-1]) * 0.95]
    for N, C, V in [(50, 64, 1000), (300, 96, 1025), (17, 32, 50257)]:
        labels = torch.randint(0, V, (N,))
        labels[::5] = -100
        yield f"linear_cross_entropy {N}x{C}x{V}", lambda x, w, l=labels: fox.linear_cross_entropy(x, w, l.to(x.device))[0], \
            lambda x, w, l=labels: naive_cross_entropy(x, w, l), [torch.randn(N, C), torch.randn(V, C) * C**-0.5]
    for B, Tq, Tk, H, Hk, D, extra in [(2, 130, 130, 4, 4, 64, {}), (1, 257, 257, 4, 2, 128, {}), (1, 5, 133, 2, 2, 64, {}),
                                       (1, 200, 200, 2, 2, 64, {"window": 64}), (2, 100, 100, 3, 3, 80, {})]:
        q, k, v = strided(B, Tq, H, D), strided(B, Tk, Hk, D), strided(B, Tk, Hk, D)
        log_f = F.logsigmoid(torch.randn(B, Tk, H) * 2 + 1)
        yield f"forgetting_attn {B}x{Tq}/{Tk}x{H}/{Hk}x{D} {extra}", \
            lambda q, k, v, f, e=extra: fox.forgetting_attn(q, k, v, f.double() if q.dtype == torch.float64 else f.float(), **e)[0], \
            None, [q, k, v, log_f]


def run(function, tensors, cotangents):
    """Results and gradients, as float64 on the CPU."""
    leaves = [t.detach().clone().as_strided(t.size(), t.stride()) if t.is_contiguous() else t.detach() for t in tensors]
    leaves = [t.requires_grad_() for t in leaves]
    outs = as_tuple(function(*leaves))
    torch.autograd.backward(outs, [g.to(o.device, o.dtype) for o, g in zip(outs, cotangents)])
    return [t.double().cpu() for t in [o.detach() for o in outs] + [t.grad for t in leaves]]


def as_tuple(out):
    return (out,) if torch.is_tensor(out) else tuple(out)


def check(names, out_dir):
    torch.manual_seed(0)
    ran, failed = 0, []
    for name, function, naive, tensors in cases():
        if names and not name.startswith(tuple(names)):
            continue
        attention = "forgetting" in name
        for dtype in [torch.bfloat16, torch.float16] + ([] if attention else [torch.float32, torch.float64]):
            # Values that all dtypes agree on, and a gate's float32 whatever the rest is.
            rounded = [t if attention and i == 3 else t.to(dtype) for i, t in enumerate(tensors)]
            if not all(t.isfinite().all() for t in rounded):  # float16 does not reach so far
                continue
            doubles = [t.double() for t in rounded]
            cotangents = [torch.randn(o.shape).to(dtype).double() for o in as_tuple(function(*doubles))]
            exact = run(function, doubles, cotangents)
            own = run(naive or function, rounded, cotangents)
            cuda = run(function, [t.cuda() for t in rounded], cotangents)
            outs = len(cotangents)
            parts = [f"result {i}" for i in range(outs)] + [f"gradient {i}" for i in range(len(tensors))]
            for what, e, o, c in zip(parts, exact, own, cuda):
                ran += 1
                size = e.abs().max().item() + 1e-30
                tiny = 1e-12 * (1 + size) if dtype == torch.float64 else 2 * EPS[dtype] * size + 1e-6 * (1 + size)
                error, allowed = (c - e).abs().max().item(), 2 * (o - e).abs().max().item() + tiny
                if not error <= allowed:
                    failed.append(f"{name} {dtype} {what}: error {error:.3g}, allowed {allowed:.3g}")
    print("\n".join(failed))
    print(f"operators on CUDA: {ran} comparisons, {len(failed)} failed")
    if out_dir:
        with open(os.path.join(out_dir, "ops_check.json"), "w") as f:
            json.dump({"comparisons": ran, "failed": failed}, f, indent=1)
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    load(os.path.abspath(arguments.build))
    return 0 if check(arguments.names, arguments.out) else 1


if __name__ == "__main__":
    sys.exit(main())
