#!/usr/bin/env python3
"""`fox train` started by torchrun: two ranks train as one process does, and a run of which a rank is killed goes on by
itself (--max-restarts).

usage: torchrun_test.py FOX      exit status 77: torch's launcher is not installed
"""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

RUN = """
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
intermediate_size = 24
[data]
train = ["{folder}/text.txt"]
tokenizer = "bytes"
context = 16
[train]
batch_tokens = 64
max_tokens = {tokens}
lr = 1e-2
threads = 1
precision = "float64"
rank_timeout_s = 120
[output]
dir = "{folder}/{name}"
checkpoint_interval_tokens = 6400
log_interval_steps = 1
"""


def torchrun(fox, toml, *options):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen([*launcher, *options, fox, "train", str(toml)], stderr=subprocess.PIPE, text=True)


def run_file(folder, name, steps):
    toml = folder / f"{name}.toml"
    toml.write_text(RUN.format(folder=folder, name=name, tokens=64 * steps))
    return toml


def losses(folder, name):
    metrics = folder / name / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"}


def check_same(folder, name, reference, steps):
    ours, theirs = losses(folder, name), losses(folder, reference)
    assert sorted(ours) == list(range(1, steps + 1)), "not every step is there once"
    for step, loss in ours.items():
        assert abs(loss - theirs[step]) <= 1e-9 * loss, f"step {step}: {loss} with ranks, {theirs[step]} alone"


def two_ranks(fox, folder, steps):
    process = torchrun(fox, run_file(folder, "two", steps))
    talk = process.communicate()[1]
    assert process.returncode == 0, talk
    for rank in 0, 1:
        assert len(re.findall(rf"^rank {rank} of 2: .*gloo, contexts", talk, re.M)) == 1, talk
    assert talk.count("finished: the model is in") == 1, talk
    check_same(folder, "two", "alone", steps)


def killed(fox, folder, steps):
    process = torchrun(fox, run_file(folder, "killed", steps), "--max-restarts", "1")
    talk = ""
    victim = None
    for line in process.stderr:
        talk += line
        started = re.match(r"rank 1 of 2: .*process (\d+),", line)
        if not started:
            continue
        if victim is None:
            victim = int(started[1])
            while max(losses(folder, "killed"), default=0) < 200:  # past the first checkpoints
                assert process.poll() is None, "ended by itself"
                time.sleep(0.05)
            os.kill(victim, signal.SIGKILL)
    assert process.wait() == 0, talk
    assert "continuing at step" in talk, talk
    check_same(folder, "killed", "alone", steps)


def main():
    fox = sys.argv[1]
    if subprocess.run([sys.executable, "-c", "import torch.distributed.run"], capture_output=True).returncode != 0:
        print("skipped: torchrun is not installed")
        return 77
    steps = 2000
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        random.seed(1)
        (folder / "text.txt").write_text("".join(random.choices("abcdefgh \n", k=4000)))
        subprocess.run([fox, "train", str(run_file(folder, "alone", steps))], check=True, stderr=subprocess.DEVNULL)
        two_ranks(fox, folder, steps)
        killed(fox, folder, steps)
    print("torchrun: two ranks train as one process, and go on when one is killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
