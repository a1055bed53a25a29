"""The programs that people point at an endpoint hold sessions with it: Codex, Claude Code, Qwen Code and opencode, from
their packages. A scripted engine calls a tool of theirs, is told the result and answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.requests.engine_client import EngineClient
from cluster.requests.served_model import ServedModel
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.conftest import ROOT, unused_port
from tests.helpers.scripted_engine import EOS, MODEL, ScriptedCoordinator, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

LOG = logging.getLogger(__name__)
PROGRAMS = Path(os.environ.get("CLIENTS", ROOT / ".venv-clients")) / "node_modules" / ".bin"
"""Where `make agents` installs the clients."""
CONTEXT = 65536
NUM_TURNS = 10
FINAL = "The folder has one file."


@dataclass(frozen=True)
class Client:
    """How a client is started."""

    program: str
    first: tuple[str, ...]
    """Arguments of a session's first turn, before the prompt."""
    later: tuple[str, ...]
    """Arguments of the turns that resume the session, before the prompt."""
    tool: str
    """A tool of the client's that reads."""
    arguments: dict[str, str]
    """Arguments of a call that finds the file `canal.txt`."""
    path: str
    """Path of the route that the client uses."""


CLIENTS = [
    Client(
        "codex",
        ("exec", "--skip-git-repo-check"),
        ("exec", "resume", "--last", "--skip-git-repo-check"),
        "exec_command",
        {"cmd": "ls"},
        "/v1/responses",
    ),
    Client(
        "claude",
        ("--model", MODEL, "--allowedTools=Bash", "-p"),
        ("--model", MODEL, "--allowedTools=Bash", "--continue", "-p"),
        "Bash",
        {"command": "ls", "description": "List the folder"},
        "/v1/messages",
    ),
    Client(
        "qwen",
        ("--auth-type", "openai", "-p"),
        ("--auth-type", "openai", "--continue", "-p"),
        "glob",
        {"pattern": "*.txt"},
        "/v1/chat/completions",
    ),
    Client(
        "opencode",
        ("run",),
        ("run", "--continue"),
        "bash",
        {"command": "ls", "description": "List the folder"},
        "/v1/chat/completions",
    ),
]


def configure(folder: Path, url: str) -> dict[str, str]:
    """Writes the clients' files, as docs/guides/clients.md has them, and returns their environment."""
    home = folder / "home"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "lockstep"\n'
        'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.lockstep]\nname = "Lockstep"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        'env_key = "LOCKSTEP_API_KEY"\n'
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 8192}}},
    }
    (folder / "opencode.json").write_text(
        json.dumps({"model": f"lockstep/{MODEL}", "provider": {"lockstep": provider}})
    )
    (folder / "canal.txt").write_text("A lock of the canal.")
    return {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(home),
        "LOCKSTEP_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
    }


@dataclass
class Seen:
    """What reached the endpoint."""

    refused: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_results: int = 0
    """Requests in which the model is told of the file."""

    def watch(self, app: ASGIApp) -> ASGIApp:
        """`app`, but noting its requests."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            body, status = b"", 0

            async def received() -> Message:
                nonlocal body
                message = await receive()
                body += message.get("body", b"")
                return message

            async def sent(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                if status >= 400 and "body" in message:
                    self.refused.append(f"{scope['path']} {status} {message['body'][:300]!r} of {body[:300]!r}")
                await send(message)

            await app(scope, received, sent)
            self.paths.append(scope["path"])
            self.num_results += b"canal.txt" in body

        return watched


@contextlib.asynccontextmanager
async def endpoint(folder: Path, port: int, seen: Seen, **script: Any) -> AsyncIterator[None]:
    """An endpoint of its own at `port`, with nothing left of an earlier one."""
    tokenizer = Tokenizer.load(script.pop("tokenizer"))
    coordinator = ScriptedCoordinator(reply=[EOS], **script)
    (folder / "engine.sock").unlink(missing_ok=True)
    listening = await asyncio.start_unix_server(coordinator.serve, folder / "engine.sock")
    engine = await EngineClient.connect(str(folder / "engine.sock"))
    model = ServedModel(
        engine, tokenizer, model_name=MODEL, max_model_len=CONTEXT, server=ServerConfig(), version="1.2"
    )
    async with served(seen.watch(create_app(model)), at=port):
        yield
    await model.close()
    await engine.close()
    listening.close()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_a_client_holds_ten_turns_through_a_cancel_and_a_restart(
    client: Client, tmp_path: Path, smollm2_path: Path
) -> None:
    program = PROGRAMS / client.program
    if not program.exists():
        pytest.skip("`make agents` has not installed the clients")
    tokenizer, port, seen = Tokenizer.load(smollm2_path), unused_port(), Seen()
    call = json.dumps({"name": client.tool, "arguments": client.arguments})
    texts = [f"I look.\n<tool_call>\n{call}\n</tool_call>", FINAL]
    script: dict[str, Any] = {
        "tokenizer": smollm2_path,
        "replies": [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in texts],
    }
    work = tmp_path / "work"
    work.mkdir()
    environment = configure(work, f"http://127.0.0.1:{port}")

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            program,
            *arguments,
            cwd=work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def turn(index: int) -> None:
        process = await start(*(client.later if index else client.first), f"Question {index}: what is in the folder?")
        out, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, (out[-2000:], errors[-2000:])
        assert seen.refused == []

    async def scenario() -> None:
        process = await start("--version")
        LOG.warning("%s %s", client.program, (await process.communicate())[0].decode().strip())
        async with endpoint(tmp_path, port, seen, **script):
            for index in range(NUM_TURNS // 2):
                await turn(index)
        async with endpoint(tmp_path, port, seen, **script, hang_after=1):
            num_paths = len(seen.paths)
            process = await start(*client.later, "A question that nobody waits for.")
            await asyncio.sleep(8)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, since clients start themselves again
            await asyncio.wait_for(process.communicate(), 60)
            while len(seen.paths) == num_paths:  # noqa: ASYNC110 -- the app has no event for it
                await asyncio.sleep(0.05)
        async with endpoint(tmp_path, port, seen, **script):
            for index in range(NUM_TURNS // 2, NUM_TURNS):
                await turn(index)
        assert client.path in seen.paths
        assert seen.num_results >= NUM_TURNS // 2

    asyncio.run(scenario())
