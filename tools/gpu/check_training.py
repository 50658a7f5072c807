#!/usr/bin/env python3
"""Training on a GPU: a run that is killed ends with the bits of one that is not; steps that are not finite are kept out.

usage: tools/gpu/check_training.py FOX [--device cuda] [--kills 2] [--out FILE] [--set table.key=value …]

A FoX (Pro) of two layers at the published length, 24 steps of two micro-batches on random words, a checkpoint every 4
steps, an evaluation every 2, with train.deterministic. On a GPU steps are repeated as a CUDA graph, and a run without one
ends with the same bits. Exit status 1 when something is not as it should be.
"""

import argparse
import hashlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

STEP, STEPS = 32768, 24


def write_text(path, count=200000, seed=1):
    random.seed(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random.choices(letters, k=random.randint(1, 8))) for _ in range(5000)]
    path.write_text(" ".join(random.choices(words, k=count)))


def command(a, folder, name, *settings):
    base = ["model.hidden_size=256", "model.num_hidden_layers=2", "model.num_heads=4",
            f'data.train=["{folder}/text.txt"]', f'data.valid=["{folder}/valid.txt"]', "data.format=text", "data.tokenizer=gpt2",
            f"data.cache={folder}/tokens", f"output.dir={folder}/{name}",
            f"train.batch_tokens={STEP}", f"train.micro_batch_tokens={STEP // 2}", f"train.max_tokens={STEP * STEPS}",
            f"train.warmup_tokens={2 * STEP}", f"output.checkpoint_interval_tokens={4 * STEP}", "output.log_interval_steps=1",
            "eval.max_tokens=16384", f"eval.interval_tokens={2 * STEP}", "train.deterministic=true", "output.keep_last=1"]
    if a.device.startswith("cuda"):
        base.append("train.cuda_graph=on")
    run = [a.fox, "train", "configs/longcrawl64/fox_pro_125m_2.7b.toml", "--device", a.device]
    return run + [x for s in [*base, *settings, *a.set] for x in ("--set", s)]


def metrics(folder, name):
    file = folder / name / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [x for x in lines if x["kind"] == "train"]


def result_of(folder, name):
    """What a run ended with: its last checkpoint, and what it logged but for the clock."""
    checkpoint = folder / name / "checkpoints" / f"tokens-{STEP * STEPS:015d}"
    files = {f: hashlib.sha256((checkpoint / f).read_bytes()).hexdigest() for f in ("model.safetensors", "trainer.safetensors")}
    return files, [(x["step"], x["loss"], x["grad_norm"], x["lr"]) for x in metrics(folder, name)]


def run_and_kill(a, folder, name, after):
    """Starts or continues the run and kills it when it has logged `after` steps."""
    process = subprocess.Popen(command(a, folder, name), stderr=subprocess.DEVNULL)
    while process.poll() is None and len(metrics(folder, name)) < after:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def check_kills(a, folder):
    subprocess.run(command(a, folder, "whole"), check=True, stderr=subprocess.DEVNULL)
    print("undisturbed run done", file=sys.stderr)
    subprocess.run(command(a, folder, "no_graph", "train.cuda_graph=off"), check=True, stderr=subprocess.DEVNULL)
    killed = [run_and_kill(a, folder, "killed", STEPS * (i + 1) // (a.kills + 1) + 1) for i in range(a.kills)]
    print("killed", killed, file=sys.stderr)
    subprocess.run(command(a, folder, "killed"), check=True, stderr=subprocess.DEVNULL)
    whole = result_of(folder, "whole")
    return {"kills": sum(killed), "same_bits": all(killed) and whole == result_of(folder, "killed"),
            "same_bits_without_graph": whole == result_of(folder, "no_graph")}


def check_not_finite(a, folder):
    """A learning rate that spoils the weights for good: the run stops after the stated number of bad steps."""
    settings = ["train.lr=1e30", f"train.warmup_tokens={10 * STEP}", "train.max_bad_steps=3"]
    done = subprocess.run(command(a, folder, "spoilt", *settings), stderr=subprocess.PIPE, text=True)
    lines = metrics(folder, "spoilt")
    bad = [x["step"] for x in lines if "fault" in x]
    error = [line for line in done.stderr.splitlines() if line.startswith("error")]
    ok = done.returncode == 1 and len(bad) >= 3 and bad[-3:] == list(range(bad[-1] - 2, bad[-1] + 1)) and lines[-1]["step"] == bad[-1]
    return {"ok": ok, "bad_steps": bad, "fault": lines[-1].get("fault") if lines else None, "error": error}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("fox")
    p.add_argument("--device", default="cuda")
    p.add_argument("--kills", type=int, default=2)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--set", action="append", default=[], help="further settings of all runs")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_text(folder / "text.txt")
        write_text(folder / "valid.txt", count=30000, seed=2)
        result = {"device": a.device, "killed": check_kills(a, folder), "not_finite": check_not_finite(a, folder)}
    print(json.dumps(result, indent=2))
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")
    killed = result["killed"]
    return 0 if killed["same_bits"] and killed["same_bits_without_graph"] and result["not_finite"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
