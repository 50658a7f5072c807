"""Launches a few backward passes for a profiler. usage: profile_backward.py LIBRARY D T GATE(off|on)"""

import sys

import torch

import fox_backward as fb
import fox_kernels as fk

lib, D, T, gate = fk.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
H = 1536 // D
q, k = fk.normalised(1, T, H, D), fk.normalised(1, T, H, D)
v, d_o = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
call = fb.Backward(lib, q, k, v, d_o, fk.log_spaced_gates(1, T, H) if gate == "on" else None)
call.run()
for _ in range(3):
    call.run_backward()
torch.cuda.synchronize()
