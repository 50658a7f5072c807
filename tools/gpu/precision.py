#!/usr/bin/env python3
"""bf16 training against float32: the demo's FoX (Pro), 500 steps, some seeds; the same data and first weights for each pair.

usage: tools/gpu/precision.py FOX [--bf16-device cuda] [--float32-device cpu] [--seeds 3] [--runs DIR] [--out FILE]

Trains what DIR does not hold yet (DIR/bf16-0, DIR/float32-0, …; a metrics.jsonl is enough), then compares the means of
the last 50 losses: they may differ by two standard deviations of a seed. Needs runs/demo/corpus (make demo). Exit status
1 when they differ by more.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

STEPS, LAST = 500, 50


def losses(run):
    """Losses of the last steps of a finished run, or None."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return None
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    train = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    return [train[s] for s in range(STEPS - LAST + 1, STEPS + 1)] if STEPS in train else None


def train(fox, run, precision, device, seed):
    tokens = 1024 * STEPS
    settings = [f"train.precision={precision}", f"train.max_tokens={tokens}", f"train.warmup_tokens={tokens // 10}",
                f"output.dir={run}", "output.log_interval_steps=1", f"data.cache={run.parent}/tokens", "eval.sample_tokens=0"]
    command = [fox, "train", "configs/demo/fox_pro.toml", "--device", device, "--seed", str(seed)]
    subprocess.run(command + [x for s in settings for x in ("--set", s)], check=True, stderr=subprocess.DEVNULL)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("fox")
    p.add_argument("--bf16-device", default="cuda")
    p.add_argument("--float32-device", default="cpu")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--runs", default="runs/precision", type=pathlib.Path)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--only", choices=["bf16", "float32"], help="train these runs and compare nothing")
    a = p.parse_args()
    devices = {"bf16": a.bf16_device, "float32": a.float32_device}
    means = {}
    for precision in [a.only] if a.only else devices:
        means[precision] = []
        for seed in range(a.seeds):
            run = a.runs.absolute() / f"{precision}-{seed}"
            if losses(run) is None:
                train(a.fox, run, precision, devices[precision], seed)
            means[precision].append(statistics.mean(losses(run)))
    if a.only:
        return 0
    mean = {k: statistics.mean(v) for k, v in means.items()}
    deviation = max(statistics.stdev(v) for v in means.values())
    difference = mean["bf16"] - mean["float32"]
    result = {"model": "configs/demo/fox_pro.toml", "steps": STEPS, "last": LAST, "devices": devices, "means": means,
              "difference": difference, "standard_deviation": deviation, "ok": abs(difference) <= 2 * deviation}
    print(json.dumps(result))
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
