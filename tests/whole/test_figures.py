"""What README says was measured is in a committed result, and results name commits of this repository."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
WITH_UNIT = re.compile(r"\d (?:ms|us|s|%|x|GB|MB|MiB|tok/s|times|tokens a second)(?![\w/])")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")

CODE = (".py", ".c", ".h")
PACKAGES = ("configs", "parallel", "attention", "worker", "cluster")
CORE = (*PACKAGES[:-1], *(f"cluster/{room}" for room in ("messages", "scheduling", "engine", "ranks")))


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def _rows() -> Iterator[list[str]]:
    """Cells of each row of README's tables whose last column is headed `result`."""
    is_result = False
    for line in PROSE.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells or cells[-1] == "result":
            is_result = bool(cells)
        elif is_result and set(line) - set("|- "):
            yield cells


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in FIGURE.findall(text)]


def _is_among(figure: str, numbers: list[float]) -> bool:
    """Whether a number rounds to `figure`."""
    digits = len(figure.partition(".")[2])
    return any(round(number, digits) == float(figure.replace(",", "")) for number in numbers)


@pytest.mark.parametrize("cells", [*_rows()], ids=[f"{i} {cells[0]}" for i, cells in enumerate(_rows())])
def test_every_figure_of_the_readme_is_in_the_result_beside_it(cells: list[str]) -> None:
    files = re.findall(r"`([^`]+)`", cells[-1])
    assert files, "a row of figures names no result"
    numbers = [number for file in files for number in _numbers((RESULTS / file).read_text())]
    for figure in FIGURE.findall(" ".join(cells[1:-1])):
        assert _is_among(figure, numbers), f"{figure} is not in {' or '.join(files)}"


def test_figures_of_the_readme_stand_in_rows_that_name_their_result() -> None:
    rows = [*_rows()]
    assert len(rows) > 10
    of_rows = "\n".join(" ".join(cells) for cells in rows)
    for line in PROSE.splitlines():
        found = [] if line.startswith("|") and line.strip("| ").split(" | ")[0] in of_rows else WITH_UNIT.findall(line)
        assert not found, f"a figure without its result: {line}"


def test_results_name_commits_of_this_repository() -> None:
    inside = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if inside.stdout.strip() != "false":
        pytest.skip("a checkout without the repository's history")
    named = {
        (path.name, commit)
        for path in [*RESULTS.iterdir(), ROOT / "README.md"]
        for commit in COMMIT.findall(path.read_text())
    }
    assert named
    for name, commit in sorted(named):
        found = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
        assert found.returncode == 0, f"{name} names commit {commit}, which is not in this repository"


def test_the_readme_says_how_long_the_code_is() -> None:
    """Within a fiftieth: what it asks a reader for."""

    def lines_in(rooms: tuple[str, ...]) -> int:
        return sum(_lines(path) for room in rooms for path in (ROOT / room).rglob("*.*") if path.suffix in CODE)

    tour = README.partition("## The tour")[2].partition("## Develop")[0]
    steps = re.findall(r"^\d\. (.*?):", tour, flags=re.MULTILINE)
    files = [ROOT / name for step in steps for name in re.findall(r"`([^`]+)`", step)]
    core, whole = lines_in(CORE), lines_in(PACKAGES)
    said = [
        int(number.replace(",", "")) for number in re.findall(r"(\d+,\d{3})(?= lines|\.$)", tour, flags=re.MULTILINE)
    ]
    assert said == pytest.approx([sum(map(_lines, files)), core, whole - core], rel=0.02)
