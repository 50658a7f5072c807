"""The loops around WGMMA in built kernels: how many instructions of each kind, and in which order ptxas put them.
usage: loops.py OBJECT [KERNEL] [--order]      the loops of kernels whose mangled names hold KERNEL
       loops.py OBJECT [KERNEL] --than OTHER   which of them are the same in another build
OBJECT is an object or library of nvcc's, for example build/CMakeFiles/…/forgetting_attn_bwd_sm90_bf16_d64.cu.o. Needs
cuobjdump (CUDA). What a change does to these loops is seen here before it is measured: the same source beside them may
order them differently, which has been worth 5 % (docs/kernels.md).
"""

import argparse
import collections
import re
import shutil
import subprocess
import sys

FEWEST_WGMMA = 8
KINDS = ("HGMMA", "MUFU", "FFMA", "FADD", "FMUL", "LDS", "STS", "SHFL", "LDL", "STL")


def fail(what, hint):
    sys.exit(f"error: {what}\nhint: {hint}")


def loops(path, kernel):
    """(kernel, [instruction]) of each innermost loop around WGMMA, predicates taken off."""
    if not shutil.which("cuobjdump"):
        fail("cuobjdump is not on the PATH", "it is in the folder of nvcc, or in the package cuda-cuobjdump")
    dump = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True)
    if dump.returncode:
        fail(f"cuobjdump cannot read {path}: {dump.stderr.strip()}", "give an object file or library made by nvcc")
    for function in dump.stdout.split("Function : ")[1:]:
        name = function.split("\n", 1)[0]
        if kernel not in name:
            continue
        code = [(int(at, 16), re.sub(r"^@!?U?P\d ", "", text))
                for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", function)]
        bodies, last = [], -1
        for at, text in code:  # by the loops' ends: an outer one begins at or before the last inner one did
            target = re.match(r"BRA.*?0x([0-9a-f]+)", text)
            if not target or int(target[1], 16) >= at:
                continue
            body = [x for place, x in code if int(target[1], 16) <= place <= at]
            if int(target[1], 16) > last and sum("HGMMA" in x for x in body) >= FEWEST_WGMMA:
                bodies.append(body)
                last = at
        yield from ((name, body) for body in bodies)


def order(body):
    """Runs of instructions of one kind; waits with what they wait for, address arithmetic left out."""
    runs = []
    for text in body:
        kind = text.split(".")[0].split()[0]
        if kind in ("UMOV", "UIADD3", "ULOP3", "ULEA", "R2UR", "UIMAD", "NOP"):
            continue
        kind = text if kind in ("WARPGROUP", "BAR") else kind
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return " | ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in runs)


def without_places(body):
    return [re.sub(r"0x[0-9a-f]+", "#", x) for x in body]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("object")
    args.add_argument("kernel", nargs="?", default="")
    args.add_argument("--order", action="store_true")
    args.add_argument("--than")
    args = args.parse_args()
    others = list(loops(args.than, args.kernel)) if args.than else []
    for i, (name, body) in enumerate(loops(args.object, args.kernel)):
        counts = collections.Counter(x.split(".")[0].split()[0] for x in body)
        print(name, len(body), "instructions:", ", ".join(f"{kind} {counts[kind]}" for kind in KINDS))
        if args.than:
            same = i < len(others) and without_places(others[i][1]) == without_places(body)
            print("  the same" if same else "  another")
        if args.order:
            print(" ", order(body))


if __name__ == "__main__":
    main()
