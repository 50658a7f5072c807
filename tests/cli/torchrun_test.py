#!/usr/bin/env python3
"""`fox train` started by torchrun: two ranks, one of which is killed on the way, go on by themselves (--max-restarts) and
train as one process does.

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
lr = 1e-3
threads = 1
precision = "float64"
rank_timeout_s = 120
[output]
dir = "{folder}/{name}"
checkpoint_interval_tokens = 6400
log_interval_steps = 1
"""


def run_file(folder, name, steps):
    toml = folder / f"{name}.toml"
    toml.write_text(RUN.format(folder=folder, name=name, tokens=64 * steps))
    return toml


def losses(folder, name):
    metrics = folder / name / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"}


def train_and_kill(fox, toml, folder, name):
    """What the ranks and the launcher said, and the exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen([*launcher, "--max-restarts", "1", fox, "train", str(toml)],
                               stderr=subprocess.PIPE, text=True)
    talk = ""
    killed = False
    for line in process.stderr:
        talk += line
        started = re.match(r"rank 1 of 2: .*process (\d+),", line)
        if not started or killed:
            continue
        while max(losses(folder, name), default=0) < 200:  # past the first checkpoints
            assert process.poll() is None, talk
            time.sleep(0.05)
        os.kill(int(started[1]), signal.SIGKILL)
        killed = True
    return talk, process.wait()


def main():
    fox = sys.argv[1]
    steps = 1000
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        random.seed(1)
        (folder / "text.txt").write_text("".join(random.choices("abcdefgh \n", k=4000)))
        talk, status = train_and_kill(fox, run_file(folder, "ranks", steps), folder, "ranks")
        if status != 0 and "rank 0" not in talk and re.search("ModuleNotFoundError|ImportError|OSError", talk):
            print(f"skipped: torchrun is not installed\n{talk}")
            return 77
        assert status == 0, talk
        for rank in 0, 1:
            lines = re.findall(rf"^rank {rank} of 2: .*gloo, contexts", talk, re.M)
            assert len(lines) == 2, talk  # one each time
        assert "continuing at step" in talk, talk
        assert talk.count("finished: the model is in") == 1, talk

        subprocess.run([fox, "train", str(run_file(folder, "alone", steps))], check=True, stderr=subprocess.DEVNULL)
        ours, theirs = losses(folder, "ranks"), losses(folder, "alone")
        assert sorted(ours) == list(range(1, steps + 1)), "not every step is there once"
        for step, loss in ours.items():  # training carries a difference of one bit further and further
            assert abs(loss - theirs[step]) <= 1e-6 * loss, f"step {step}: {loss} with ranks, {theirs[step]} alone"
    print("torchrun: two ranks, one of them killed, train as one process does")
    return 0


if __name__ == "__main__":
    sys.exit(main())
