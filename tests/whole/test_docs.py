"""The documentation: its commands run, its reference is that of the code, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from cluster.commands.cli import app
from cluster.routes import ROUTES
from configs.json_schema import config_file_schema
from configs.load import all_settings, parse_engine_config
from tests.cluster.test_cli import (
    BIN,
    Head,
    environment,
    head,
    is_ready,
    read_until_ready,
    served,
    shared_head,
    wait_for,
)
from tests.conftest import ROOT, Endpoint
from tests.helpers.docs import docs_generator

__all__ = ["head", "shared_head"]  # fixtures

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEFAULT_ADDRESS = "127.0.0.1:8000"
COMMAND_LINE = re.compile(r"^(python -m cluster|ray|serve|curl|make|lockstep|pip) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    kind: str
    """What stands behind the fence, e.g. `bash serve`."""
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.stem}:{self.line}"


def _blocks() -> list[Block]:
    blocks = []
    for page in PAGES:
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            line = page.read_text()[: match.start()].count("\n") + 1
            blocks.append(Block(page, line, match[1].strip(), match[2]))
    return blocks


def _of(kind: str) -> Any:
    found = [block for block in _blocks() if block.kind == kind]
    assert found, f"no block of kind {kind}: the pattern is wrong"
    return pytest.mark.parametrize("block", found, ids=lambda block: block.id)


def _run(command: list[str], **variables: str) -> str:
    # A process that the test's own interpreter starts would else take the activated environment of a developer.
    variables = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_command_that_is_shown_is_a_command_that_is_run() -> None:
    for block in _blocks():
        if block.kind not in ("bash", "bash serve", "bash cluster"):
            # README's begin as a person begins, on a machine of theirs; the guides run the same.
            assert block.page.name == "README.md" or not COMMAND_LINE.search(block.text), block.id


@pytest.mark.slow
@pytest.mark.ray
@_of("bash")
def test_commands_run(block: Block, endpoint: Endpoint, smollm2_path: Path) -> None:
    text = block.text.replace(DEFAULT_ADDRESS, endpoint.url.removeprefix("http://"))
    assert _run(["bash", "-euo", "pipefail", "-c", text]), "nothing was printed"


@pytest.mark.slow
@pytest.mark.ray
@_of("python")
def test_programs_run(block: Block, endpoint: Endpoint) -> None:
    text = block.text.replace(DEFAULT_ADDRESS, endpoint.url.removeprefix("http://"))
    assert _run([sys.executable, "-c", text]).strip()


@pytest.mark.exhaustive
@pytest.mark.ray
@_of("bash serve")
def test_servers_start(block: Block, free_port: int, smollm2_path: Path) -> None:
    program, *arguments = block.text.removeprefix("python -m cluster ").split()
    assert program == "serve"
    with served(free_port, *arguments[1:]) as server:
        assert f"http://127.0.0.1:{free_port}/v1" in read_until_ready(server)
        server.terminate()
        server.wait(30)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_cluster_serves_what_the_guide_submits(
    head: Head, free_port: int, tmp_path: Path, smollm2_path: Path
) -> None:
    submit, stop, deploy = (block.text for block in _blocks() if block.kind == "bash cluster")
    config = tmp_path / "here.yaml"
    document = yaml.safe_load((ROOT / "configs" / "smollm2-135m.yaml").read_text())
    document["http_options"]["port"] = free_port
    config.write_text(yaml.safe_dump(document))
    variables = {"RAY_ADDRESS": head.dashboard_url, "RAY_DASHBOARD_ADDRESS": head.dashboard_url}
    url = f"http://127.0.0.1:{free_port}"
    port = f"configs/smollm2-135m.yaml --set http_options.port={free_port}"
    for command in submit.replace("configs/smollm2-135m.yaml", port).splitlines():
        _run(["bash", "-euo", "pipefail", "-c", command], **variables)
    wait_for(lambda: is_ready(url), 240, "the job's endpoint")
    _run(["bash", "-c", stop], **variables)
    wait_for(lambda: not is_ready(url), 120, "the end of the app")
    _run(["bash", "-c", deploy.replace("configs/smollm2-135m.yaml", str(config))], **variables)
    wait_for(lambda: is_ready(url), 240, "the deployed endpoint")


@_of("yaml")
def test_manifests_hold_a_config_that_is_one(block: Block) -> None:
    document = yaml.safe_load(block.text)
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    jsonschema.Draft202012Validator(config_file_schema()).validate(config)
    parse_engine_config(config["applications"][0]["args"])


def test_generated_docs_are_those_of_the_code_and_the_results() -> None:
    for name, text in docs_generator().pages().items():
        assert (ROOT / name).read_text() == text, f"{name} is old: run `make generate`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


SETTINGS = all_settings()
SECTIONS = {name.split(".")[0] for name in SETTINGS if "." in name}
GROUP: Any = typer.main.get_command(app)
HANDWRITTEN = [page for page in PAGES if page.parent.name != "reference" and page.name != "measured.md"]


@cache
def _files() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def _is_file(path: str) -> bool:
    """Whether the path of a file or folder of the checkout is or ends in `path`. NAME stands for any name."""
    pattern = path.replace("NAME", "*").strip("/")
    return any(fnmatch(f"/{file}/", f"*/{pattern}/*") for file in _files())


def _is_route(method: str | None, path: str) -> bool:
    """Whether there is a route of this path, or one below it. Parameters may have other names."""
    wanted = re.compile(f"{method or '[A-Z]+'} {re.escape(re.sub('{.*?}', '{}', path))}(/.*)?")
    return any(wanted.fullmatch(f"{route.method} {re.sub('{.*?}', '{}', route.path)}") for route in ROUTES)


KINDS: list[tuple[str, Callable[..., bool]]] = [
    (r"(?:/srv/lockstep/)?(?!generation_config|\.venv)([\w.*-]+/[\w./*-]*|[\w*-]+\.(?:py|yaml|md|json))", _is_file),
    (rf"((?:{'|'.join(SECTIONS)})\.[a-z_.]+)(?:: .*)?", SETTINGS.__contains__),
    (r"(lockstep_\w+)", lambda name: f"`{name}`" in (ROOT / "docs/reference/metrics.md").read_text()),
    (r"make ([a-z-]+).*", lambda name: bool(re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE))),
    (r"python -m cluster (?:-v )?([a-z]+).*", GROUP.commands.__contains__),
    (r"(?:python -m )?benchmarks\.(\w+).*", lambda name: _is_file(f"benchmarks/{name}.py")),
    (r"(?:(GET|POST|DELETE) )?(/(?!etc/|srv/|tmp/)[\w./{}-]*)", _is_route),
]
"""What a name in backticks may be, each with how to tell that it exists. Other names are not checked."""


def _false_names(text: str) -> Iterator[str]:
    """The names in backticks, outside fenced blocks, that do not exist."""
    for name in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        for pattern, exists in KINDS:
            if (found := re.fullmatch(pattern, name)) is not None:
                if not exists(*found.groups()):
                    yield name
                break


@pytest.mark.parametrize("page", HANDWRITTEN, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_names_that_a_page_mentions_exist(page: Path) -> None:
    assert not list(_false_names(page.read_text()))
