"""The Dockerfile of the Kubernetes example: its steps are run in a new environment, without Docker and the network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

DOCKERFILE = ROOT / "docs" / "guides" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("configs", "parallel", "attention", "worker", "cluster")


class Step(NamedTuple):
    """One instruction."""

    name: str
    text: str


def steps() -> list[Step]:
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text()).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]


def has_package_lists() -> bool:
    """Whether this machine is a Debian that knows its packages."""
    if shutil.which("apt-get") is None:
        return False
    return subprocess.run(["apt-cache", "show", "bash"], capture_output=True, check=False).returncode == 0


class Image:
    """What the steps have made so far: a tree, and an environment with the dependencies and none of our packages."""

    def __init__(self, path: Path) -> None:
        self.root = path / "root"
        self.workdir = self.root
        self.user = "root"
        venv.create(path / "venv", symlinks=True, with_pip=True)
        self.bin = path / "venv" / "bin"
        packages = next((path / "venv").glob("lib/python3*/site-packages"))
        shutil.rmtree(packages / "setuptools", ignore_errors=True)  # Python 3.11 brings an old one
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(self, command: list[str]) -> str:
        """What `command` prints in the environment. It has no more of ours than the steps put there."""
        variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.root), "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            command, cwd=self.workdir, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def take(self, step: Step) -> None:
        match step.name:
            case "FROM":
                [version] = re.findall(r"^python:([0-9.]+)-slim$", step.text)
                assert version in SpecifierSet(PROJECT["requires-python"])
            case "WORKDIR":
                self.workdir = self.root / step.text.lstrip("/")
                self.workdir.mkdir(parents=True)
            case "COPY":
                *sources, target = step.text.split()
                for source in sources:
                    self._copy(ROOT / source, self.workdir / target / (source if target == "./" else ""))
            case "RUN":
                for command in step.text.split("&&"):
                    self._execute(command.split())
            case "USER":
                assert self.user == step.text, "no step made this user"
            case "CMD":
                program, *arguments = json.loads(step.text)
                assert "Usage" in self.run([str(self.bin / program), *arguments])
            case _:
                pytest.fail(f"this test does not know {step.name}, so nothing checks it")

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, target)

    def _execute(self, words: list[str]) -> None:
        match words:
            case ["pip", "install", *rest]:
                # The dependencies are those of the environment that runs this test.
                offline = ("--no-deps", "--no-build-isolation", "--no-index")
                self.run([str(self.bin / "pip"), "install", *offline, *(word.strip("'") for word in rest)])
                extras = re.findall(r"\[(\w+)\]", " ".join(rest))
                assert set(extras) <= PROJECT["optional-dependencies"].keys(), extras
            case ["useradd", "--create-home", name]:
                self.user = name
            case ["apt-get", "update"] | ["rm", "-rf", "/var/lib/apt/lists/*"]:
                pass
            case ["apt-get", "install", "-y", "--no-install-recommends", *names]:
                if has_package_lists():
                    subprocess.run(["apt-get", "install", "--simulate", *names], check=True, capture_output=True)
            case _:
                pytest.fail(f"this test does not know how to run {words}, so nothing checks it")


def test_every_step_of_the_image_works_and_it_serves_as_its_own_user(tmp_path: Path) -> None:
    image = Image(tmp_path)
    for step in steps():
        image.take(step)
    assert image.user != "root"
    rooms = [
        ".".join(file.relative_to(ROOT).parts[:-1])
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("__init__.py"))
    ]
    program = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    image.workdir = tmp_path
    files = image.run([str(image.bin / "python"), "-c", program, *rooms, "cluster.app"]).splitlines()
    assert len(files) == len(rooms) + 1
    assert all(Path(file).is_relative_to(image.root) for file in files)
    # Everything that is in the product's packages here is in the image too: kernels in C, the page, tables.
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    [copy] = image.root.glob("srv/*")
    assert [it for it in tracked if not (copy / it).exists()] == []


def test_the_kubernetes_example_uses_what_the_image_has() -> None:
    page = (ROOT / "docs" / "guides" / "deploy.md").read_text()
    [example] = [yaml.safe_load(it) for it in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "RayService" in it]
    cluster = example["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    [workdir] = [step.text for step in steps() if step.name == "WORKDIR"]
    [tag] = re.findall(r"docker build -t (\S+)", DOCKERFILE.read_text())
    for container in (it for group in groups for it in group["template"]["spec"]["containers"]):
        assert (container["image"], container["workingDir"]) == (tag, workdir)
        program = {it["name"]: it["value"] for it in container["env"]}["RAY_SERVE_HAPROXY_BINARY_PATH"]
        assert os.access(ROOT / Path(program).relative_to(workdir), os.X_OK), program
