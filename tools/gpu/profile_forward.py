"""One forward call of each kind, to be run under ncu. usage: profile_forward.py D T [off|ones|log_spaced|pruned ...]"""

import math
import sys

import torch

import fox_kernels as fk

D, T = int(sys.argv[1]), int(sys.argv[2])
B, H = max(1, 32768 // T), 1536 // D
torch.manual_seed(0)
q, k = fk.normalised(B, T, H, D), fk.normalised(B, T, H, D)
v = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)
f = fk.log_spaced_gates(B, T, H)
kinds = {"off": {}, "ones": dict(log_f=torch.zeros_like(f)), "log_spaced": dict(log_f=f),
         "pruned": dict(log_f=f, log_tolerance=-10.0, logit_bound=torch.full((H,), math.sqrt(D), device="cuda"))}
lib = fk.load()
for kind in sys.argv[3:] or kinds:
    fk.Forward(lib, q, k, v, **kinds[kind]).run()
torch.cuda.synchronize()
