"""Checks the size of the product against .ci/budget.txt: `python .ci/budget.py`, part of `make check`.

The table gives the most lines of each room, and the files, classes and functions that may be longer than the rule.
`python .ci/budget.py --table` prints the table's first part as the code is now.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / ".ci" / "budget.txt"
PACKAGES = ("configs", "parallel", "attention", "worker", "cluster")
CORE = (
    "configs",
    "parallel",
    "attention",
    "worker",
    *(f"cluster/{it}" for it in ("messages", "scheduling", "engine", "ranks")),
)
MOST_LINES = {"file": 450, "class": 350, "function": 60}
MOST_ARGUMENTS = 8


def files() -> Iterator[tuple[str, str]]:
    """Path from the root and text of each file that counts: Python and C."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.*")):
            if path.suffix in (".py", ".c", ".h"):
                yield path.relative_to(ROOT).as_posix(), path.read_text()


def room_of(path: str) -> str:
    """The package's folder that a file lies in, or the package."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def long_parts(path: str, text: str) -> Iterator[tuple[str, str, int]]:
    """Kind, name and lines of what is longer than the rule; calls with too many positional arguments by their line.
    Functions in files of kernels may be long: Triton has no others."""
    if (lines := text.count("\n")) > MOST_LINES["file"]:
        yield "file", path, lines
    if not path.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            if len(node.args) > MOST_ARGUMENTS and "/kernels/" not in path:
                yield "call", f"{path}:{node.lineno}", len(node.args)
            continue
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MOST_LINES[kind] and (kind == "class" or "/kernels/" not in path):
            yield kind, f"{path}:{node.name}", lines


def main() -> int:
    """Prints what exceeds the budget; 1 if anything does."""
    rooms: Counter[str] = Counter()
    found: dict[str, int] = {}
    for path, text in files():
        rooms[room_of(path)] += text.count("\n")
        found |= {f"{kind} {name}": size for kind, name, size in long_parts(path, text)}
    sums = {"core": sum(n for room, n in rooms.items() if room.startswith(CORE)), "product": sum(rooms.values())}
    sizes = {**{f"room {room}": n for room, n in rooms.items()}, **{f"all {name}": n for name, n in sums.items()}}
    if "--table" in sys.argv:
        sys.stdout.writelines(f"{n:6} {name}\n" for name, n in (sizes | found).items())
        return 0
    allowed: dict[str, int] = {}
    for line in TABLE.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            number, name = line.partition("#")[0].split(maxsplit=1)
            allowed[name.strip()] = int(number)
    wrong = [
        f"{name}: {n} lines, {allowed.get(name, 0)} allowed" for name, n in sizes.items() if n > allowed.get(name, 0)
    ]
    wrong += [f"{name}: {n}, too long and not in the table" for name, n in found.items() if n > allowed.get(name, 0)]
    wrong += [
        f"{name}: in the table, but gone or short enough" for name in allowed.keys() - sizes.keys() - found.keys()
    ]
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
