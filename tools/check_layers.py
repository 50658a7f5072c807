#!/usr/bin/env python3
"""Checks that no file under src/ includes a header of a room above its own (ARCHITECTURE.md, "Rooms").

usage: tools/check_layers.py [SRC]      prints each offending include; exit status 1 if there is one
"""
import pathlib
import re
import sys

# Bottom to top; rooms on one line are strangers to each other.
LAYERS = [
    ["base"],
    ["config"],
    ["kernels/cpu", "kernels/cuda"],
    ["dist"],
    ["ops"],
    ["nn"],
    ["mixers"],
    ["model"],
    ["data"],
    ["checkpoint"],
    ["infer"],
    ["eval"],
    ["train"],
    ["report", "serve", "bench"],
    ["cli"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# These rooms must compile without torch: kernels so that they can be lifted out, the others because torch's own fmt and
# protobuf headers would shadow the system's.
NO_TORCH = {"base", "config", "kernels/cpu", "kernels/cuda", "report"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def room_of(path):
    parts = pathlib.PurePosixPath(path).parts
    for n in (2, 1):
        if "/".join(parts[:n]) in LEVEL:
            return "/".join(parts[:n])
    return None


def offences(src):
    for file in sorted(p for p in src.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        name = file.relative_to(src).as_posix()
        own = room_of(name)
        if own is None:
            yield f"{name}: lies in no room of ARCHITECTURE.md"
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match[2]
            if own in NO_TORCH and re.match(r"(ATen|torch|c10)/", target):
                yield f"{name}:{number}: {target}: '{own}' must not see torch"
            room = room_of(target) if match[1] == '"' else None
            if room is None or room == own:
                continue
            if LEVEL[room] > LEVEL[own]:
                yield f"{name}:{number}: {target}: '{room}' lies above '{own}'"
            elif LEVEL[room] == LEVEL[own]:
                yield f"{name}:{number}: {target}: '{room}' and '{own}' are strangers to each other"


def main():
    src = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "src")
    found = list(offences(src))
    print("\n".join(found) if found else "layers: no include points upward")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
