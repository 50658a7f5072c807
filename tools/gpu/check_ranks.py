#!/usr/bin/env python3
"""Training on several GPUs: the losses of one, faults that are named, restarts that go on.

usage: tools/gpu/check_ranks.py FOX [--device cuda] [--ranks 2] [--only losses|faults] [--out FILE] [--set table.key=value …]

The run of check_training.py, 50 steps of 4 contexts, on one rank, on several (with and without shard_optimizer, and with
each context split over all of them): the largest relative difference of a step's loss. Then a rank is killed on the way,
without a restart (what the others say, and after how long) and with one (losses after it). `python3 -m
torch.distributed.run` starts the ranks. Exit status 1 when something is not as it should be.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from check_training import metrics, write_text

STEPS, CONTEXT, ROWS = 50, 16384, 4
STEP = CONTEXT * ROWS
TOLERANCE = 1e-3  # relative, of a step's loss


def settings(folder, name):
    return ["model.hidden_size=256", "model.num_hidden_layers=2", "model.num_heads=4", f'data.train=["{folder}/text.txt"]',
            "data.valid=[]", "data.format=text", "data.tokenizer=gpt2", f"data.cache={folder}/tokens",
            f"output.dir={folder}/{name}", f"train.batch_tokens={STEP}", f"train.micro_batch_tokens={CONTEXT}",
            f"train.max_tokens={STEP * STEPS}", f"train.warmup_tokens={4 * STEP}", "train.rank_timeout_s=30",
            f"output.checkpoint_interval_tokens={10 * STEP}", "output.log_interval_steps=1", "output.keep_last=1"]


def command(a, folder, name, ranks, *more, restarts=0):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", f"--nproc-per-node={ranks}",
                f"--max-restarts={restarts}"] if ranks > 1 else []
    run = [*launcher, a.fox, "train", "configs/longcrawl64/fox_pro_125m_2.7b.toml", "--device", a.device]
    return run + [x for s in [*settings(folder, name), *more, *a.set] for x in ("--set", s)]


def losses(folder, name):
    """By step; of one that was done again after a restart, the last."""
    return {x["step"]: x["loss"] for x in metrics(folder, name)}


def difference(a, b):
    if set(a) != set(b) or not a:
        return None
    return max(abs(a[step] - b[step]) / abs(a[step]) for step in a)


def rank_processes(folder, name):
    """Process ids of the ranks of a run, by their number."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = dict(x.split(b"=", 1) for x in (entry / "environ").read_bytes().split(b"\0") if b"=" in x)
        except (OSError, ValueError):
            continue
        if f"output.dir={folder}/{name}".encode() in words and words[1:2] == [b"train"] and b"RANK" in environment:
            found[int(environment[b"RANK"])] = int(entry.name)
    return found


def kill_last_rank(a, folder, name, restarts):
    """Kills the last rank after 20 steps; what the run ended with, what it said, and seconds from the kill to the end."""
    with open(folder / f"{name}.log", "w+") as log:
        run = subprocess.Popen(command(a, folder, name, a.ranks, restarts=restarts), stderr=log, stdout=log)
        while run.poll() is None and len(metrics(folder, name)) < 20:
            time.sleep(0.02)
        processes = rank_processes(folder, name)
        killed = time.time()
        if processes:
            os.kill(processes[a.ranks - 1], signal.SIGKILL)
        try:
            status = run.wait(timeout=120)
        except subprocess.TimeoutExpired:
            run.kill()
            status = None
        log.seek(0)
        said = [line.rstrip() for line in log if "error:" in line or "hint:" in line or "rank " in line]
    return {"status": status, "said": said, "seconds": round(time.time() - killed, 1)}


def train(a, folder, name, ranks, *more):
    """What the run said when it went well, else its last lines."""
    done = subprocess.run(command(a, folder, name, ranks, *more), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = done.stderr.splitlines()
    return [x for x in lines if x.startswith("rank ")] if done.returncode == 0 else lines[-30:]


def check_losses(a, folder):
    runs = {"sharded": [], "unsharded": ["train.shard_optimizer=false"], "split": [f"train.sequence_ranks={a.ranks}"]}
    talk = {name: train(a, folder, name, a.ranks, *more) for name, more in runs.items()}
    found = {name: difference(losses(folder, "one"), losses(folder, name)) for name in runs}
    return {"ok": all(x is not None and x <= TOLERANCE for x in found.values()), "difference": found, "talk": talk}


def check_faults(a, folder):
    killed = kill_last_rank(a, folder, "killed", 0)
    print(json.dumps({"killed": killed}), file=sys.stderr)
    named = any(line.startswith("error:") and f"rank {a.ranks - 1}" in line for line in killed["said"])
    restarted = kill_last_rank(a, folder, "restarted", 1)
    found = difference(losses(folder, "one"), losses(folder, "restarted"))
    ok = named and killed["status"] == 1 and restarted["status"] == 0 and found is not None and found <= TOLERANCE
    return {"ok": ok, "killed": killed, "restarted": restarted, "difference": found}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("fox")
    p.add_argument("--device", default="cuda")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--only", choices=["losses", "faults"])
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--set", action="append", default=[], help="further settings of all runs")
    a = p.parse_args()
    result = {"device": a.device, "ranks": a.ranks, "steps": STEPS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_text(folder / "text.txt")
        train(a, folder, "one", 1)
        if a.only != "faults":
            result["losses"] = check_losses(a, folder)
        if a.only != "losses":
            result["faults"] = check_faults(a, folder)
    result["ok"] = all(result[part]["ok"] for part in ("losses", "faults") if part in result)
    print(json.dumps(result, indent=2))
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
