"""The backward pass through ctypes, beside fox_kernels.py, and its reference by the definition."""

import ctypes
import math

import torch

import fox_kernels as fk


class Backward(fk.Forward):
    """A prepared forward and backward call; `run_backward` only launches."""

    def __init__(self, lib, q, k, v, d_o, log_f=None, deterministic=False, **kwargs):
        super().__init__(lib, q, k, v, log_f, **kwargs)
        poisoned = lambda x: torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
        self.grads = [poisoned(q), poisoned(k), poisoned(v), poisoned(log_f) if log_f is not None else None]
        self.forward_workspace, self.d_o = self.workspace, d_o
        p = self.params
        p.d_o, p.deterministic = fk.tensor(d_o), int(deterministic)
        p.d_q, p.d_k, p.d_v, p.d_log_f = (fk.tensor(x) for x in self.grads)
        size = lib.fox_forgetting_attn_backward_workspace(ctypes.byref(p))
        self.backward_workspace = torch.full((max(size, 1),), 255, dtype=torch.uint8, device=q.device)

    def _use(self, workspace):
        self.params.workspace, self.params.workspace_bytes = workspace.data_ptr(), workspace.numel()

    def run(self):
        self._use(self.forward_workspace)
        return super().run()

    def set_forward(self, o, lse):
        """Results of a forward pass made elsewhere."""
        self.o.copy_(o)
        self.lse.copy_(lse)

    def run_backward(self):
        self._use(self.backward_workspace)
        stream = torch.cuda.current_stream().cuda_stream
        if self.lib.fox_forgetting_attn_backward(ctypes.byref(self.params), stream):
            raise RuntimeError(self.lib.fox_kernels_last_error().decode())
        return self.grads


def gradients(q, k, v, d_o, log_f=None, scale=None, dtype=torch.float64, low=None, seq_start=None,
              kept_behind=None, **masks):
    """o, lse, dq, dk, dv, dlog_f by the definition in `dtype`. With `low`, all products have operands and results of
    that dtype, and so has o, from which the row term is then taken (the naive way). kept_behind(lse): the blocks that
    pruning leaves of the backward pass."""
    B, Tq, H, D = q.shape
    Tk, Hk, scale = k.shape[1], k.shape[2], scale or D ** -0.5
    padding = None
    if seq_start is not None:
        padding = torch.arange(Tk, device=q.device)[None] < seq_start[:, None]
        k, v = (x.masked_fill(padding[..., None, None], 0) for x in (k, v))
        q, d_o = (x.masked_fill(padding[:, Tk - Tq:, None, None], 0) for x in (q, d_o))
        log_f = log_f.masked_fill(padding[..., None], 0) if log_f is not None else None
    o, lse = fk.reference(q, k, v, log_f, scale, dtype, low, seq_start, **masks)
    if kept_behind is not None:
        masks = {**masks, "kept": kept_behind(lse)}
    seen = fk.logits_mask(B, Tq, Tk, seq_start=seq_start, device=q.device, **masks)
    K, V = (x.repeat_interleave(H // Hk, 2) for x in (k, v))
    product = low or dtype
    mm = lambda spec, x, y: torch.einsum(spec, x.to(product), y.to(product)).to(dtype)
    s = mm("bihd,bjhd->bhij", q, K) * scale
    if log_f is not None:
        c = log_f.double().clamp(min=-1e6).cumsum(1).transpose(1, 2)
        s = s + (c[..., Tk - Tq:, None] - c[..., None, :]).to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    p = torch.exp(s - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0))
    del s
    dv = mm("bhij,bihd->bjhd", p, d_o)
    delta = (o.to(product).to(dtype) * d_o.to(dtype)).sum(-1).transpose(1, 2)
    ds = p * (mm("bihd,bjhd->bhij", d_o, V) - delta[..., None])
    del p
    dq, dk = mm("bhij,bjhd->bihd", ds, K) * scale, mm("bhij,bihd->bjhd", ds, q) * scale
    dk, dv = (x.unflatten(2, (Hk, H // Hk)).sum(3) for x in (dk, dv))
    if log_f is None:
        return o, lse, dq, dk, dv, None
    dc = -ds.double().sum(-2)
    dc[..., Tk - Tq:] += ds.double().sum(-1)
    df = dc.flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    df[:, 0] = 0
    if "cu_seqlens" in masks:
        df[:, masks["cu_seqlens"][:-1].clamp(max=Tk - 1)] = 0
    df = df.masked_fill(log_f == -math.inf, 0)
    if padding is not None:
        df = df.masked_fill(padding[..., None], 0)
        df[torch.arange(B, device=q.device), seq_start.clamp(max=Tk - 1)] = 0
    return o, lse, dq, dk, dv, df
