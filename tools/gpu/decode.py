"""Checks decoding against float64 and times it beside cuDNN. usage: decode.py [--check] [--bench] [--out FILE.json]"""

import argparse
import ctypes
import json
import math
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fox_kernels as fk


class Prefix(ctypes.Structure):
    _fields_ = [("r", ctypes.c_void_p), ("block", ctypes.c_void_p), ("max_blocks", ctypes.c_int32)]


class Params(ctypes.Structure):
    """ForgettingDecodeParams of src/kernels/cuda/forgetting_decode.h, field by field."""
    _fields_ = [(n, ctypes.c_int32) for n in ("dtype", "batch", "query_len", "query_heads", "kv_heads", "head_dim")]
    _fields_ += [("q", fk.Tensor), ("o", fk.Tensor), ("lse", ctypes.c_void_p), ("k", fk.Tensor), ("v", fk.Tensor),
                 ("block_table", ctypes.c_void_p), ("max_pages", ctypes.c_int32), ("key_len", ctypes.c_void_p),
                 ("max_key_len", ctypes.c_int32), ("prefix", Prefix), ("scale", ctypes.c_float),
                 ("window", ctypes.c_int32), ("pruned", ctypes.c_int32), ("log_tolerance", ctypes.c_float),
                 ("logit_bound", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t)]


class Decode:
    """k, v (B, T, Hk, D), or pools (pages, 64, D) with `table` (B, Hk, max_pages); log_f (B, T, H) or None."""

    def __init__(self, lib, q, k, v, lengths, log_f=None, table=None, window=0, tolerance=None, bound=None, append=1):
        B, Tq, H, D = q.shape
        self.lib, self.keep = lib, [q, k, v, log_f, table, bound]
        self.o = torch.full_like(q, float("nan"))
        self.lse = torch.full((B, H, Tq), float("nan"), device="cuda")
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        p = self.params = Params()
        p.dtype = {torch.bfloat16: 0, torch.float16: 1}[q.dtype]
        p.batch, p.query_len, p.query_heads, p.head_dim = B, Tq, H, D
        p.kv_heads = k.shape[2] if table is None else table.shape[1]
        p.q, p.o, p.lse = fk.tensor(q), fk.tensor(self.o), self.lse.data_ptr()
        if table is None:
            p.k, p.v = fk.tensor(k), fk.tensor(v)
        else:
            p.k, p.v = (fk.Tensor(x.data_ptr(), x.stride(0), x.stride(1), 0) for x in (k, v))
            p.block_table, p.max_pages = table.data_ptr(), table.shape[2]
        p.key_len, p.max_key_len = self.lengths.data_ptr(), max(lengths)
        p.scale, p.window = D ** -0.5, window
        if log_f is not None:
            blocks = (max(lengths) + 63) // 64
            self.r = torch.full((B, H, blocks * 64), float("nan"), device="cuda")
            self.block = torch.full((B, H, blocks, 2), float("nan"), device="cuda")
            p.prefix = Prefix(self.r.data_ptr(), self.block.data_ptr(), blocks)
            self.fill_prefix(log_f, lengths, append)
        if tolerance is not None:
            p.pruned, p.log_tolerance, p.logit_bound = 1, tolerance, bound.data_ptr()
        size = lib.fox_forgetting_decode_workspace(ctypes.byref(p))
        self.workspace = torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda")
        p.workspace, p.workspace_bytes = self.workspace.data_ptr(), size

    def fill_prefix(self, log_f, lengths, append):
        """All but the last `append` gates of each sequence at once, those one by one, as a prefill and steps would."""
        for b, n in enumerate(lengths):
            p = self.params.prefix
            own = Prefix(self.r[b].data_ptr(), self.block[b].data_ptr(), p.max_blocks)
            at = 0
            for end in ([n - append] if n > append else []) + list(range(max(n - append, 0) + 1, n + 1)):
                gates = log_f[b:b + 1, at:end]
                length = torch.tensor([end], device="cuda", dtype=torch.int32)
                assert not self.lib.fox_forgetting_prefix_append(own, fk.tensor(gates), 1, log_f.shape[2], end - at,
                                                                 ctypes.c_void_p(length.data_ptr()), None)
                torch.cuda.synchronize()
                at = end

    def run(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.lib.fox_forgetting_decode(ctypes.byref(self.params), stream):
            raise RuntimeError(self.lib.fox_kernels_last_error().decode())
        return self.o, self.lse

    def kept_keys(self):
        p = self.params
        begin = self.workspace[:p.batch * p.kv_heads * 4].view(torch.int32).view(p.batch, p.kv_heads)
        return (self.lengths[:, None] - begin).sum().item()


def load():
    lib = fk.load()
    lib.fox_forgetting_decode_workspace.restype = ctypes.c_size_t
    lib.fox_forgetting_prefix_append.argtypes = [Prefix, fk.Tensor, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
                                                 ctypes.c_void_p, ctypes.c_void_p]
    return lib


def cases():
    base = dict(lengths=[300, 1, 64, 1025], Tq=1, H=4, Hk=4, D=64, gate=True, dtype="bf16", paged=False)
    for D in (64, 128):
        for gate in (False, True):
            for Tq in (1, 3, 8):
                yield {**base, "D": D, "gate": gate, "Tq": Tq, "lengths": [300, 8, 64, 1025]}
        for H, Hk in ((8, 1), (8, 2), (32, 2)):
            yield {**base, "D": D, "H": H, "Hk": Hk, "Tq": 2, "lengths": [300, 700]}
        yield {**base, "D": D, "paged": True}
        yield {**base, "D": D, "paged": True, "H": 8, "Tq": 4, "lengths": [513, 4, 640, 2000]}
        yield {**base, "D": D, "window": 100, "Tq": 3, "lengths": [300, 50, 640]}
        yield {**base, "D": D, "tolerance": -10.0, "lengths": [5000, 300], "strong": True}
        yield {**base, "D": D, "tolerance": -10.0, "lengths": [5000, 300], "strong": True, "paged": True, "H": 8}
        yield {**base, "D": D, "lengths": [0, 65]}
        yield {**base, "D": D, "lengths": [520], "resets": True, "Tq": 8}
    for D in (8, 40, 96, 136, 256):
        yield {**base, "D": D}
    for D in (64, 128, 256):
        yield {**base, "D": D, "dtype": "fp16", "Tq": 4, "lengths": [300, 128]}


def check(lib, c):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[c["dtype"]]
    B, T, D, H, Hk, Tq = len(c["lengths"]), max(c["lengths"]), c["D"], c["H"], c["Hk"], c["Tq"]
    q = torch.randn(B, Tq, H, D, device="cuda", dtype=dtype)
    k, v = (torch.randn(B, T, Hk, D, device="cuda", dtype=dtype) for _ in range(2))
    f = None
    if c["gate"]:
        f = torch.nn.functional.logsigmoid((0.0 if c.get("strong") else 4.0) + torch.randn(B, T, H, device="cuda"))
        if c.get("resets"):
            f = torch.where(torch.rand_like(f) < 0.3, -torch.inf, f)
    for b, n in enumerate(c["lengths"]):  # what lies behind a sequence must not matter
        k[b, n:], v[b, n:] = float("nan"), float("nan")
    extra = {n: c[n] for n in ("window", "tolerance") if n in c}
    if "tolerance" in c:
        extra["bound"] = fk.logit_bound(q, k)
    if c["paged"]:
        pages = (T + 63) // 64
        table = torch.randperm(B * Hk * pages, device="cuda").view(B, Hk, pages).int()
        pad = torch.nn.functional.pad
        pools = []
        for x in (k, v):
            pool = torch.full((B * Hk * pages, 64, D), float("nan"), device="cuda", dtype=dtype)
            split = pad(x, (0, 0, 0, 0, 0, pages * 64 - T)).view(B, pages, 64, Hk, D).permute(0, 3, 1, 2, 4)
            pool[table.flatten().long()] = split.reshape(-1, 64, D)
            pools.append(pool)
        call = Decode(lib, q, *pools, c["lengths"], f, table, append=min(3, T), **extra)
    else:
        call = Decode(lib, q, k, v, c["lengths"], f, append=min(3, T), **extra)
    o, lse = call.run()
    torch.cuda.synchronize()
    worst = {"error": 0.0, "naive_error": 0.0, "lse_error": 0.0}
    ok = True
    for b, n in enumerate(c["lengths"]):
        if n == 0:
            ok = ok and (o[b] == 0).all().item() and (lse[b] == -torch.inf).all().item()
            continue
        tq = min(Tq, n)
        args = (q[b:b + 1, Tq - tq:], k[b:b + 1, :n], v[b:b + 1, :n], f[b:b + 1, :n] if f is not None else None)
        ref, ref_lse = fk.reference(*args, window=c.get("window", 0))
        naive, _ = fk.reference(*args, dtype=torch.float32, low=dtype, window=c.get("window", 0))
        (e, l2), (ne, nl2) = fk.errors(o[b:b + 1, Tq - tq:], ref), fk.errors(naive.to(dtype), ref)
        lse_error = (lse[b:b + 1, :, Tq - tq:] - ref_lse).abs().max().item()
        eps = torch.finfo(dtype).eps
        ok = ok and e <= 2 * ne + eps * ref.abs().max().item() and l2 <= 2 * nl2 + eps / 2 and lse_error < 2e-3
        ok = ok and not torch.isnan(o[b]).any().item()
        for name, value in (("error", e), ("naive_error", ne), ("lse_error", lse_error)):
            worst[name] = max(worst[name], value)
    return {**c, **worst, "ok": bool(ok), "kept": call.kept_keys()}


def bench(lib, T, B, H=24, D=64, repeats=15):
    torch.manual_seed(0)
    q = fk.normalised(B, 1, H, D)
    k = fk.normalised(B, T, H, D)
    v = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    kh, vh = (x.transpose(1, 2).contiguous() for x in (k, v))  # cuDNN's favourite layout; ours pages by head likewise
    f = fk.log_spaced_gates(1, T, H).expand(B, T, H).contiguous()
    bound = torch.full((H,), math.sqrt(D), device="cuda")
    qt = q.transpose(1, 2)
    kb, vb = kh.transpose(1, 2), vh.transpose(1, 2)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(qt, kh, vh)

    lengths = [T] * B
    calls = {"cudnn": cudnn, "off": Decode(lib, q, kb, vb, lengths), "log_spaced": Decode(lib, q, kb, vb, lengths, f),
             "pruned": Decode(lib, q, kb, vb, lengths, f, tolerance=-10.0, bound=bound)}
    runs = {n: c if n == "cudnn" else c.run for n, c in calls.items()}
    times = {n: [] for n in runs}
    for _ in range(repeats):
        for n, run in runs.items():
            run()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(8):
                run()
            end.record()
            times[n].append((begin, end))
    torch.cuda.synchronize()
    for n, pairs in times.items():
        ms = sorted(b.elapsed_time(e) / 8 for b, e in pairs)
        keys = T * B * H if n == "cudnn" else calls[n].kept_keys()
        median = statistics.median(ms)
        yield dict(op="forgetting_decode", gates="off" if n in ("cudnn", "off") else "log_spaced", pruned=n == "pruned",
                   kernel="cudnn" if n == "cudnn" else "fox", dtype="bf16", B=B, T=T, H=H, D=D, ms=round(median, 4),
                   ms_spread=round(ms[-1] - ms[0], 4), tb_per_s=round(keys * D * 4 / median / 1e9, 3),
                   kept=round(keys / (T * B * H), 3))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--check", action="store_true")
    args.add_argument("--bench", action="store_true")
    args.add_argument("--out")
    args = args.parse_args()
    lib, failed, rows = load(), 0, []
    torch.manual_seed(0)
    if args.check:
        results = [check(lib, c) for c in cases()]
        for r in results:
            if not r["ok"]:
                print("FAIL", r)
        failed = sum(not r["ok"] for r in results)
        print(f"decode: {len(results) - failed} of {len(results)} cases passed", flush=True)
    if args.bench:
        for T, B, D in ((65536, 1, 64), (65536, 8, 64), (16384, 32, 64), (65536, 1, 128), (16384, 8, 128)):
            for row in bench(lib, T, B, 1536 // D, D):
                rows.append(row)
                print(row, flush=True)
    if args.out:
        with open(args.out, "w") as out:
            out.writelines(json.dumps(r) + "\n" for r in rows)
    return failed != 0


if __name__ == "__main__":
    raise SystemExit(main())
