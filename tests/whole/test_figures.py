"""Figures in docs are read from committed results, and results name commits of this repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.docs import docs_generator

RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
WITH_UNIT = re.compile(r"\d (?:ms|us|s|%|x|GB|MB|MiB|tok/s|times|tokens a second)(?![\w/])")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")

CODE = (".py", ".c", ".h")
PACKAGES = ("configs", "parallel", "attention", "worker", "cluster")
CORE = (*PACKAGES[:-1], *(f"cluster/{room}" for room in ("messages", "scheduling", "engine", "ranks")))


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def test_a_figure_comes_from_the_file_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result with another number makes another docs/measured.md; a path without a number is an error."""
    name = "chaos_tp4_h200_2026-11-26.json"
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    shutil.copy(RESULTS.parent / "peers.json", tmp_path)
    (results / name).write_text((RESULTS / name).read_text().replace("1630", "1631"))
    generator = docs_generator()
    before = generator.measured.measured()
    monkeypatch.setattr(generator.measured, "RESULTS", results)
    generator.measured._read.cache_clear()
    after = generator.measured.measured()
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        next(line for line in before.splitlines() if name in line).replace("1,630", "1,631")
    ]
    for cell in ("streams_missing:d", "pause/SIGKILL:.2f"):
        with pytest.raises((KeyError, TypeError)):
            generator.measured._figure(name, cell)
    generator.measured._read.cache_clear()  # other tests read the committed results


def test_the_readme_has_no_figure_outside_of_the_generated_list() -> None:
    generated = re.search(r"<!-- figures.*?<!-- end of figures -->", PROSE, re.DOTALL)
    assert generated is not None
    assert len(WITH_UNIT.findall(generated[0])) >= 5
    assert not WITH_UNIT.findall(PROSE.replace(generated[0], ""))


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
