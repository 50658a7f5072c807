#!/usr/bin/env python3
"""Writes the expected values in tests/golden from the executable specification (reference.py), in float64.

    python tests/spec/make_golden.py [--out tests/golden] [--seed 1]

Inputs and weights are rounded to float32 before anything is computed from them and are stored so; what is computed is
stored as float64. Three kinds of file, read by tests/model/golden_test.cpp (FOX_GOLDEN_DIR names another folder):

op_*     q k v do [log_f] [seq_start] o dq dk dv [dlog_f]; metadata scale (a number or "default"), window (or "none"),
         gates, exact_resets (log_f = -inf was computed as the limit, not as a large number). q, do, o (B, Tq, H, D); k, v (B, Tk, Hk, D); log_f (B, Tk, H). dlog_f is left out where gates are -inf.
model_*  w.NAME grad.NAME input_ids labels logits loss; metadata config (JSON, published keys). Gradients are those of
         the mean loss.
train_*  w.NAME final.NAME data (steps, accumulation, B, T) loss grad_norm lr; metadata config and the recipe.
"""
import argparse
import json
import math
import pathlib
import re

import torch
from safetensors.torch import save_file

import reference

OPS = {  # name: (B, Tq, Tk, H, Hk, D, gates, further arguments); small, since git keeps every byte
    "basic": (1, 40, 40, 2, 2, 16, "normal", {}),
    "no_gate": (1, 40, 40, 2, 2, 16, "none", {}),
    "ones": (1, 40, 40, 2, 2, 16, "ones", {}),
    "scale": (1, 40, 40, 2, 2, 16, "normal", {"scale": 0.5}),
    "strong": (1, 80, 80, 1, 1, 16, "strong", {}),
    "weak": (1, 80, 80, 1, 1, 16, "weak", {}),
    "tiny": (1, 70, 70, 2, 2, 16, "tiny", {}),
    "resets": (1, 80, 80, 2, 2, 16, "resets", {}),
    "minus_inf": (1, 80, 80, 2, 2, 16, "inf", {}),
    "big_logits": (1, 60, 60, 2, 2, 16, "normal", {"q_factor": 30.0}),
    "t1": (1, 1, 1, 2, 2, 16, "normal", {}),
    "d24_b2": (2, 33, 33, 1, 1, 24, "normal", {}),
    "d64": (1, 50, 50, 1, 1, 64, "normal", {}),
    "d80": (1, 33, 33, 1, 1, 80, "normal", {}),
    "d128": (1, 20, 20, 1, 1, 128, "normal", {}),
    "d256": (1, 9, 9, 1, 1, 256, "normal", {}),
    "t193": (1, 193, 193, 1, 1, 16, "normal", {}),
    "gqa4": (1, 70, 70, 4, 1, 16, "normal", {}),
    "gqa2_q_short": (1, 9, 70, 4, 2, 16, "normal", {}),
    "q_short": (1, 17, 90, 2, 2, 16, "normal", {}),
    "q_one": (1, 1, 77, 2, 2, 16, "normal", {}),
    "window": (1, 90, 90, 2, 2, 16, "normal", {"window": 33}),
    "window1": (1, 20, 20, 2, 2, 16, "normal", {"window": 1}),
    "left_pad": (3, 30, 30, 2, 2, 16, "normal", {"seq_start": [0, 7, 29]}),
    "left_pad_all": (2, 20, 30, 2, 2, 16, "normal", {"seq_start": [3, 30]}),
}

SMALL = {"vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 8}
ONE = {"num_hidden_layers": 1}  # enough for one part on its own
FOX = dict(SMALL, model_type="forgetting_transformer-project_fox", num_heads=2, norm_eps=1e-6)
PRO = dict(FOX, use_k_shift=True, use_v_shift=True, qk_norm=True, use_output_gate=True, use_output_norm=True)
TRANSFORMER = dict(SMALL, model_type="transformer-project_fox", num_heads=2, rope_base=500000.0)
MODELS = {
    "fox_llama": dict(FOX, **ONE),
    "fox_llama_bias_only": dict(FOX, **ONE, fgate_type="bias_only", fgate_bias_init=True, decay_time_min=2.0,
                                decay_time_max=64.0),
    "fox_pro": PRO,
    "fox_pro_fixed": dict(PRO, **ONE, fgate_type="fixed", fgate_bias_init=True, decay_time_min=2.0,
                          decay_time_max=256.0),
    "fox_pro_rope": dict(PRO, **ONE, use_rope=True, rope_base=500000.0),
    "fox_pro_shared_qknorm": dict(PRO, **ONE, qk_norm_share_param_across_head=True),
    "fox_kshift_only": dict(FOX, **ONE, use_k_shift=True),
    "fox_vshift_only": dict(FOX, **ONE, use_v_shift=True),
    "fox_qknorm_only": dict(FOX, **ONE, qk_norm=True),
    "fox_gate_only": dict(FOX, **ONE, use_output_gate=True),
    "fox_gate_silu": dict(FOX, **ONE, use_output_gate=True, ogate_act="silu"),
    "fox_norm_only": dict(FOX, **ONE, use_output_norm=True),
    "transformer_llama": dict(TRANSFORMER, **ONE),
    "transformer_gqa": dict(TRANSFORMER, **ONE, num_heads=4, num_kv_heads=2),
    "transformer_swa": dict(TRANSFORMER, **ONE, window_size=13),
    "transformer_pro": dict(PRO, **ONE, fgate_type="none", use_rope=True, rope_base=500000.0),
    "hgrn2": dict(SMALL, **ONE, model_type="hgrn2-project_fox", expand_ratio=16),
    "hgrn2_lower_bound": dict(SMALL, model_type="hgrn2-project_fox", expand_ratio=16, apply_lower_bound=True),
    "delta_net": dict(SMALL, **ONE, model_type="delta_net-project_fox", num_heads=2),
    "mamba2": dict(SMALL, **ONE, model_type="mamba2-project_fox", num_heads=4, head_dim=16, state_size=8, n_groups=1,
                   expand=2, conv_kernel=4),
    "samba": dict(SMALL, model_type="samba-project_fox", state_size=4, expand=2, conv_kernel=4, rope_base=500000.0,
                  attn={"layers": None, "num_heads": 2, "num_kv_heads": None, "window_size": 17}),
}
TRAININGS = {"fox_pro": PRO, "transformer_llama": dict(TRANSFORMER, **ONE)}
RECIPE = {"peak_lr": 3e-3, "warmup_steps": 6, "steps": 30, "grad_accumulation": 2, "weight_decay": 0.1,
          "betas": [0.9, 0.95], "eps": 1e-8, "max_grad_norm": 1.0}


def rounded(x):
    """Float64 values that float32 holds exactly."""
    return x.float().double()


def gates(kind, shape):
    """log f of each pattern, or None."""
    if kind == "none":
        return None
    x = torch.randn(shape, dtype=torch.float64)
    if kind == "ones":
        return torch.zeros(shape, dtype=torch.float64)
    mean = {"normal": 3.0, "strong": -3.0, "weak": 9.0, "tiny": 0.0, "resets": 4.0, "inf": 4.0}[kind]
    f = torch.nn.functional.logsigmoid(x + mean)
    rare = torch.rand(shape) < 0.05
    if kind == "tiny":
        f = torch.full(shape, -100.0, dtype=torch.float64)
    if kind == "resets":
        f = torch.where(rare, torch.full_like(f, -1e4), f)
    if kind == "inf":
        f = torch.where(rare, torch.full_like(f, -math.inf), f)
    return rounded(f)


def make_op(spec):
    B, Tq, Tk, H, Hk, D, kind, more = spec
    more = dict(more)
    q = rounded(torch.randn(B, Tq, H, D, dtype=torch.float64) * more.pop("q_factor", 1.0)).requires_grad_()
    k, v = (rounded(torch.randn(B, Tk, Hk, D, dtype=torch.float64)).requires_grad_() for _ in "kv")
    do = rounded(torch.randn(B, Tq, H, D, dtype=torch.float64))
    f = gates(kind, (B, Tk, H))
    start = more.pop("seq_start", None)
    start = None if start is None else torch.tensor(start)
    inputs = [q, k, v] + ([] if f is None else [f.requires_grad_()])
    o = reference.forgetting_attention(q, k, v, f, seq_start=start, **more)
    grads = torch.autograd.grad(o, inputs, do)
    tensors = {"q": q.float(), "k": k.float(), "v": v.float(), "do": do.float(), "o": o}
    tensors |= dict(zip(("dq", "dk", "dv", "dlog_f"), grads))
    if f is not None:
        tensors["log_f"] = f.float()
    if kind == "inf":
        del tensors["dlog_f"]
    if start is not None:
        tensors["seq_start"] = start
    metadata = {"scale": str(more.get("scale", "default")), "window": str(more.get("window", "none")), "gates": kind}
    return tensors, metadata | {"exact_resets": "true"}


def fox_shapes(cfg, p, C):
    H, Hk = cfg["num_heads"], cfg.get("num_kv_heads") or cfg["num_heads"]
    D = C // H
    s = {p + "q_proj.weight": (C, C), p + "o_proj.weight": (C, C)}
    for name in "kv":
        if cfg.get(f"use_{name}_shift"):
            s[f"{p}{name}_proj.linear.weight"] = (C, C)
            s[f"{p}{name}_proj.shift_proj.weight"] = (H, C)
        else:
            s[f"{p}{name}_proj.weight"] = (Hk * D, C)
    if cfg.get("qk_norm"):
        width = D if cfg.get("qk_norm_share_param_across_head") else C
        s |= {p + "q_norm.weight": (width,), p + "k_norm.weight": (width,)}
    if cfg["model_type"].startswith("forgetting"):
        kind = cfg.get("fgate_type", "full")
        if kind == "full":
            s |= {p + "fgate_proj.weight": (H, C), p + "fgate_proj.bias": (H,)}
        elif kind != "none":
            s[p + "fgate_bias"] = (H,)
    if cfg.get("use_output_gate"):
        s[p + "ogate_proj.weight"] = (C, C)
    if cfg.get("use_output_norm"):
        s[p + "output_norm.weight"] = (C,)
    return s


def mixer_shapes(cfg, p, i, C):
    kind = cfg["model_type"].split("-")[0]
    if kind == "samba" and i % 2:
        return fox_shapes(dict(cfg["attn"], model_type="transformer"), p, C)
    if kind == "samba":
        I, N, K = 2 * C, cfg["state_size"], cfg["conv_kernel"]
        R = cfg.get("time_step_rank") or -(-C // 16)
        return {p + "in_proj.weight": (2 * I, C), p + "conv1d.weight": (I, 1, K), p + "conv1d.bias": (I,),
                p + "x_proj.weight": (R + 2 * N, I), p + "dt_proj.weight": (I, R), p + "dt_proj.bias": (I,),
                p + "A_log": (I, N), p + "D": (I,), p + "out_proj.weight": (C, I)}
    if kind == "mamba2":
        H, I, N, K = cfg["num_heads"], cfg["num_heads"] * cfg["head_dim"], cfg["state_size"], cfg["conv_kernel"]
        return {p + "in_proj.weight": (2 * I + 2 * N + H, C), p + "conv1d.weight": (I + 2 * N, 1, K),
                p + "conv1d.bias": (I + 2 * N,), p + "dt_bias": (H,), p + "A_log": (H,), p + "D": (H,),
                p + "norm.weight": (I,), p + "out_proj.weight": (C, I)}
    if kind == "hgrn2":
        return {p + n + "_proj.weight": (C, C) for n in "qfio"} | {p + "g_norm.weight": (C,)}
    if kind == "delta_net":
        H = cfg["num_heads"]
        s = {p + n + "_proj.weight": (C, C) for n in "qkvo"} | {p + n + "_conv1d.weight": (C, 1, 4) for n in "qkv"}
        return s | {p + "b_proj.weight": (H, C), p + "o_norm.weight": (C // H,)}
    return fox_shapes(cfg, p, C)


def shapes(cfg):
    """The published name and the shape of every weight."""
    C, V, I, kind = cfg["hidden_size"], cfg["vocab_size"], cfg["intermediate_size"], cfg["model_type"].split("-")[0]
    root = "backbone." if kind in ("mamba2", "samba") else "model."
    mix = "mixer" if kind in ("mamba2", "samba") else "attn"
    s = {root + "embeddings.weight": (V, C), "lm_head.weight": (V, C)}
    s[root + ("norm_f.weight" if root == "backbone." else "norm.weight")] = (C,)
    if kind == "hgrn2":
        s[root + "lower_bounds"] = (cfg["num_hidden_layers"], C)
    for i in range(cfg["num_hidden_layers"]):
        p = f"{root}layers.{i}."
        s |= mixer_shapes(cfg, f"{p}{mix}.", i, C)
        if kind == "mamba2":
            s[p + "norm.weight"] = (C,)
        else:
            s |= {f"{p}{mix}_norm.weight": (C,), p + "mlp_norm.weight": (C,),
                  p + "mlp.gate_proj.weight": (2 * I, C), p + "mlp.down_proj.weight": (C, I)}
    return s


def make_weights(cfg):
    """Random, and far enough from symmetric starting values (0, 1) that every gradient says something."""
    w = {}
    for name, shape in sorted(shapes(cfg).items()):
        x = torch.randn(shape, dtype=torch.float64)
        if name.endswith("norm.weight") or name.endswith("norm_f.weight") or name.endswith(".D"):
            w[name] = 1 + 0.2 * x
        elif name.endswith("fgate_bias"):
            kind = cfg["fgate_type"]
            w[name] = reference.decay_bias_init(shape[0], cfg["decay_time_min"], cfg["decay_time_max"])
            w[name] = w[name] + (0.3 * x if kind == "bias_only" else 0)
        elif name.endswith("fgate_proj.bias"):
            w[name] = 2 + x
        elif name.endswith("A_log"):
            w[name] = torch.rand(shape, dtype=torch.float64).mul(3).add(1).log()
        elif name.endswith("dt_bias") or name.endswith("dt_proj.bias"):
            w[name] = -2 + 0.5 * x
        elif name.endswith("embeddings.weight"):
            w[name] = x
        elif name.endswith("conv1d.weight"):
            w[name] = 0.5 * x
        else:
            w[name] = x * (1.0 if x.dim() < 2 else 1.2 * shape[-1] ** -0.5)
    return {name: rounded(x) for name, x in w.items()}


def learnt(cfg, w):
    """Names of what training changes: fixed gates are constants."""
    return [n for n in w if not (n.endswith("fgate_bias") and cfg.get("fgate_type") == "fixed")]


def make_model(cfg, B=2, T=29):
    w = make_weights(cfg)
    names = learnt(cfg, w)
    for n in names:
        w[n].requires_grad_()
    tokens = torch.randint(cfg["vocab_size"], (B, T + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    logits = reference.forward(cfg, w, ids)
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    grads = torch.autograd.grad(loss.mean(), [w[n] for n in names], allow_unused=True)
    tensors = {"w." + n: x.float() for n, x in w.items()}
    tensors |= {"grad." + n: torch.zeros_like(w[n]) if g is None else g for n, g in zip(names, grads)}
    tensors |= {"input_ids": ids, "labels": labels, "logits": logits, "loss": loss}
    return tensors, {"config": json.dumps(cfg)}


def learning_rate(t, r):
    if t < r["warmup_steps"]:
        return r["peak_lr"] * t / r["warmup_steps"]
    return r["peak_lr"] * 0.5 * (1 + math.cos(math.pi * (t - r["warmup_steps"]) / (r["steps"] - r["warmup_steps"])))


def make_training(cfg, B=2, T=21):
    r, w = RECIPE, make_weights(cfg)
    tensors = {"w." + n: x.float() for n, x in w.items()}
    w = {n: x.requires_grad_() for n, x in w.items()}
    # A noisy cycle through the vocabulary, so that there is something to learn in thirty steps.
    start = torch.randint(cfg["vocab_size"], (r["steps"], r["grad_accumulation"], B, 1))
    data = (start + 3 * torch.arange(T) + (torch.rand(*start.shape[:3], T) < 0.2) * 5) % cfg["vocab_size"]
    decays = [n for n in w if not re.search(r"(norm\.weight|bias)$", n)]
    optimizer = torch.optim.AdamW(
        [{"params": [w[n] for n in decays], "weight_decay": r["weight_decay"]},
         {"params": [x for n, x in w.items() if n not in decays], "weight_decay": 0.0}],
        betas=tuple(r["betas"]), eps=r["eps"])
    history = {"loss": [], "grad_norm": [], "lr": []}
    for t in range(r["steps"]):
        optimizer.zero_grad()
        total = 0.0
        for labels in data[t]:
            ids = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
            loss = reference.loss_per_token(cfg, w, ids, labels).mean() / r["grad_accumulation"]
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), r["max_grad_norm"]).item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, r)
        optimizer.step()
        for key, value in zip(("loss", "grad_norm", "lr"), (total, norm, learning_rate(t, r))):
            history[key].append(value)
    tensors |= {"final." + n: x.detach() for n, x in w.items()}
    tensors |= {key: torch.tensor(values, dtype=torch.float64) for key, values in history.items()}
    return tensors | {"data": data}, {"config": json.dumps(cfg)} | {k: json.dumps(v) for k, v in r.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parents[1] / "golden")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [("op_" + n, make_op, s) for n, s in OPS.items()]
    jobs += [("model_" + n, make_model, c) for n, c in MODELS.items()]
    jobs += [("train_" + n, make_training, c) for n, c in TRAININGS.items()]
    for name, make, spec in jobs:
        torch.manual_seed(args.seed)
        tensors, metadata = make(spec)
        tensors = {n: t.detach().contiguous() for n, t in tensors.items()}
        save_file(tensors, args.out / f"{name}.safetensors", metadata)
    print(f"{len(jobs)} files in {args.out}")


if __name__ == "__main__":
    main()
