"""build-cuda/libfox_kernels.so through ctypes on torch tensors, and what its results are compared with."""

import ctypes
import math
import os

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride_b", ctypes.c_int64), ("stride_t", ctypes.c_int64),
                ("stride_h", ctypes.c_int64)]


class Params(ctypes.Structure):
    """ForgettingAttnParams of src/kernels/cuda/forgetting_attn.h, field by field."""
    _fields_ = [(n, ctypes.c_int32) for n in
                ("dtype", "batch", "query_len", "key_len", "query_heads", "kv_heads", "head_dim")]
    _fields_ += [(n, Tensor) for n in ("q", "k", "v", "o")]
    _fields_ += [("lse", ctypes.c_void_p), ("log_f", Tensor)]
    _fields_ += [(n, Tensor) for n in ("d_o", "d_q", "d_k", "d_v", "d_log_f")]
    _fields_ += [("scale", ctypes.c_float), ("window", ctypes.c_int32), ("seq_start", ctypes.c_void_p),
                 ("cu_seqlens", ctypes.c_void_p), ("num_documents", ctypes.c_int32), ("pruned", ctypes.c_int32),
                 ("log_tolerance", ctypes.c_float), ("logit_bound", ctypes.c_void_p),
                 ("deterministic", ctypes.c_int32), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t),
                 ("use_sm80_kernels", ctypes.c_int32), ("bad_gate", ctypes.c_void_p)]


def load(path=os.environ.get("FOX_KERNELS") or os.path.join(ROOT, "build-cuda", "libfox_kernels.so")):
    fox = os.path.join(os.path.dirname(path), "libfox.so")
    if os.path.exists(fox):  # a whole build's libfox_cuda.so finds fox in what was loaded before it
        ctypes.CDLL(fox, mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(path)
    for name in ("forward", "backward"):
        if not hasattr(lib, f"fox_forgetting_attn_{name}"):
            continue
        getattr(lib, f"fox_forgetting_attn_{name}").argtypes = [ctypes.POINTER(Params), ctypes.c_void_p]
        size = getattr(lib, f"fox_forgetting_attn_{name}_workspace")
        size.argtypes, size.restype = [ctypes.POINTER(Params)], ctypes.c_size_t
    lib.fox_kernels_last_error.restype = ctypes.c_char_p
    return lib


def tensor(x):
    return Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)) if x is not None else Tensor()


class Forward:
    """One prepared call: all memory is allocated here, `run` only launches."""

    def __init__(self, lib, q, k, v, log_f=None, scale=None, window=0, seq_start=None, cu_seqlens=None,
                 log_tolerance=None, logit_bound=None, poison=True, sm80=False):
        B, Tq, H, D = q.shape
        self.lib, self.keep = lib, (q, k, v, log_f, seq_start, cu_seqlens, logit_bound)
        self.o = torch.full((B, Tq, H, D), float("nan") if poison else 0.0, dtype=q.dtype, device=q.device)
        self.lse = torch.full((B, H, Tq), float("nan"), device=q.device,
                              dtype=torch.float64 if q.dtype == torch.float32 else torch.float32)
        self.bad_gate = torch.zeros(1, dtype=torch.int64, device=q.device)
        p = self.params = Params()
        p.dtype = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[q.dtype]
        p.batch, p.query_len, p.key_len, p.query_heads, p.kv_heads, p.head_dim = B, Tq, k.shape[1], H, k.shape[2], D
        p.q, p.k, p.v, p.o, p.log_f = tensor(q), tensor(k), tensor(v), tensor(self.o), tensor(log_f)
        p.lse, p.scale, p.window = self.lse.data_ptr(), scale or D ** -0.5, window
        if seq_start is not None:
            p.seq_start = seq_start.data_ptr()
        if cu_seqlens is not None:
            p.cu_seqlens, p.num_documents = cu_seqlens.data_ptr(), len(cu_seqlens) - 1
        if log_tolerance is not None:
            p.pruned, p.log_tolerance = 1, log_tolerance
        if logit_bound is not None:
            p.logit_bound = logit_bound.data_ptr()
        p.use_sm80_kernels, p.bad_gate = int(sm80), self.bad_gate.data_ptr()
        size = lib.fox_forgetting_attn_forward_workspace(ctypes.byref(p))
        self.workspace = torch.full((max(size, 1),), 255, dtype=torch.uint8, device=q.device)
        p.workspace, p.workspace_bytes = self.workspace.data_ptr(), size

    def run(self):
        stream = torch.cuda.current_stream().cuda_stream
        if self.lib.fox_forgetting_attn_forward(ctypes.byref(self.params), stream):
            raise RuntimeError(self.lib.fox_kernels_last_error().decode())
        return self.o, self.lse

    def kept_blocks(self):
        """(B, H) number of 64×64 blocks that were kept, read back from the prefix part of the workspace."""
        p = self.params
        return self.workspace[:p.batch * p.query_heads * 4].view(torch.int32).view(p.batch, p.query_heads)


def first_keys(B, Tk, window=0, seq_start=None, cu_seqlens=None, device="cuda"):
    """(B, Tk) the first key that a row at each position may see."""
    position = torch.arange(Tk, device=device)
    first = (position - window + 1).clamp(min=0) if window else torch.zeros_like(position)
    if cu_seqlens is not None:
        first = torch.maximum(first, cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1])
    first = first.expand(B, Tk)
    return first if seq_start is None else torch.maximum(first, seq_start[:, None])


def logits_mask(B, Tq, Tk, kept=None, device="cuda", **masks):
    """(B, 1 or H, Tq, Tk) bool: which keys a row sees. kept: the blocks that pruning leaves (kept_blocks)."""
    i, j = torch.arange(Tk - Tq, Tk, device=device)[:, None], torch.arange(Tk, device=device)
    m = ((j <= i) & (j >= first_keys(B, Tk, **masks, device=device)[:, Tk - Tq:, None]))[:, None]
    return m if kept is None else m & kept.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :Tq, :Tk]


def kept_blocks(q, f, bound, log_tolerance, lse=None, **masks):
    """(B, H, query blocks, key blocks) bool: what pruning leaves of the causal blocks of 64×64 that masks leave. A key block
    goes if it and all before it hold at most ε of each row's weights, by exp(2 bound) times the ratio of the sums of decays,
    or, with lse of the rows known, as it is in the backward pass, by exp(bound) times the decays over exp(lse). Of a row
    whose keys a window or documents cut off, those of its own block stand for the second sum."""
    (B, Tk, H), Tq = f.shape, q.shape[1]
    offset, blocks = Tk - Tq, (Tk + 63) // 64
    padding = torch.zeros(B, 1, Tk, dtype=torch.bool, device=f.device)
    if masks.get("seq_start") is not None:
        padding = (torch.arange(Tk, device=f.device) < masks["seq_start"][:, None])[:, None]
    c = f.double().transpose(1, 2).masked_fill(padding, 0).clamp(min=-1e3).cumsum(-1)
    decay, logits = (-c).masked_fill(padding, -math.inf), bound.double() * 1.0001
    mass = torch.logcumsumexp(decay, -1)
    g = torch.arange((Tq + 63) // 64, device=f.device) * 64 + offset
    of_blocks = lambda x, fill: torch.nn.functional.pad(x, (0, blocks * 64 - Tk), value=fill).unflatten(-1, (-1, 64))
    if lse is not None:  # the least row of each block of positions, and of all behind it
        rows = (lse.double() - c[..., offset:]).masked_fill(lse == -math.inf, math.inf)
        rows = of_blocks(torch.nn.functional.pad(rows, (offset, 0), value=math.inf), math.inf)
        rows = rows.amin(-1).flip(-1).cummin(-1)[0].flip(-1)[..., g // 64]
        share = log_tolerance - logits - 2.0**-8
    else:
        own = masks.get("window") or masks.get("cu_seqlens") is not None
        rows = torch.logcumsumexp(of_blocks(decay, -math.inf), -1).flatten(-2)[..., g] if own else mass[..., g]
        rows, share = torch.maximum(rows, -c[..., g]), log_tolerance - 2 * logits
    ends = torch.nn.functional.pad(mass[..., 63::64], (0, blocks - Tk // 64), value=math.inf)
    n, last = torch.arange(blocks, device=f.device), (g + 63).clamp(max=Tk - 1) // 64
    first = torch.minimum(first_keys(B, Tk, **masks, device=f.device)[:, g] // 64, last)[:, None, :, None]
    keep = (ends[..., None, :] >= rows[..., None] + share[:, None, None]) | (n >= g[:, None] // 64)
    return keep & (n >= first) & (n <= last[:, None])


def reference(q, k, v, log_f=None, scale=None, dtype=torch.float64, low=None, seq_start=None, **masks):
    """o, lse by the definition in `dtype`. With `low`, both products are computed in that dtype (the naive way)."""
    B, Tq, H, D = q.shape
    Tk, group = k.shape[1], H // k.shape[2]
    seen = logits_mask(B, Tq, Tk, seq_start=seq_start, device=q.device, **masks)
    if seq_start is not None:  # padding may hold NaN
        pad = torch.arange(Tk, device=q.device)[None] < seq_start[:, None]
        k, v = k.masked_fill(pad[..., None, None], 0), v.masked_fill(pad[..., None, None], 0)
        q = q.masked_fill(pad[:, Tk - Tq:, None, None], 0)
        log_f = log_f.masked_fill(pad[..., None], 0) if log_f is not None else None
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    product = low or dtype
    s = torch.einsum("bihd,bjhd->bhij", q.to(product), k.to(product)).to(dtype) * (scale or D ** -0.5)
    if log_f is not None:
        c = log_f.double().clamp(min=-1e6).cumsum(1).transpose(1, 2)
        s = s + (c[..., Tk - Tq:, None] - c[..., None, :]).to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    w = torch.exp(s - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0))
    return torch.einsum("bhij,bjhd->bihd", w.to(product), v.to(product)).to(dtype), lse


def errors(x, ref):
    d = (x.double() - ref).abs()
    return d.max().item(), (d.square().sum().sqrt() / ref.square().sum().sqrt().clamp(min=1e-30)).item()


def normalised(*shape, dtype=torch.bfloat16):
    x = torch.randn(*shape, device="cuda")
    return (x * x.square().mean(-1, keepdim=True).rsqrt()).to(dtype)


def log_spaced_gates(B, T, H, shortest=8, longest=65536):
    """log f = logsigmoid(base_h + N(0, 1)) with decay times of heads spaced evenly in log from shortest to longest."""
    tau = torch.logspace(math.log10(shortest), math.log10(longest), H, device="cuda", dtype=torch.float64)
    base = -torch.log(torch.expm1(1 / tau))
    return torch.nn.functional.logsigmoid(base.float() + torch.randn(B, T, H, device="cuda"))


def logit_bound(q, k, scale=None):
    """(H,) upper bound of |q·k| scale from the norms; padding may hold NaN."""
    group = q.shape[2] // k.shape[2]
    qn = q.float().nan_to_num().norm(dim=-1).amax((0, 1))
    kn = k.float().nan_to_num().norm(dim=-1).amax((0, 1)).repeat_interleave(group)
    return (qn * kn * (scale or q.shape[-1] ** -0.5)).contiguous()
