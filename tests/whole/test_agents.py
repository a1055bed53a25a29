"""Agent frameworks run their loops against a model whose chat template shows no tools: a scripted engine calls a tool,
is told the result, calls again and answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.helpers.scripted_engine import EOS, MODEL, Stack, prompt_ids, runner, served

pytestmark = pytest.mark.exhaustive

PYTHON = Path(os.environ.get("AGENTS_VENV", ROOT / ".venv-agents")) / "bin" / "python"
"""Python of the environment that `make agents` makes."""
FINAL = "Oslo has 4 C, Rome 20 C."
CALLS = [
    '{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    '{"name": "get_weather", "arguments": {"city": "Rome"}}',
]
TURNS = [*(f"I look it up.\n<tool_call>\n{call}\n</tool_call>" for call in CALLS), FINAL]
PYTHON_AGENTS = {
    "openai_agents.py": 4,
    "pydantic_ai_agent.py": 2,
    "langchain_agent.py": 2,
    "inspect_agent.py": 1,
    "llm_agent.py": 2,
}
"""For each script, how many loops it runs."""


def check_loops(command: list[str], num_loops: int, folder: Path, smollm2_path: Path) -> None:
    """Runs an agent; it must see the final answer each time, and the engine the tools, the calls and their results."""
    tokenizer = Tokenizer.load(smollm2_path)
    replies = [[*tokenizer.encode(turn, add_special_tokens=False), EOS] for turn in TURNS]

    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url:
            process = await asyncio.create_subprocess_exec(
                *command, f"{url}/v1", MODEL, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()[-4000:]
        finals: list[Any] = json.loads(out.decode().splitlines()[-1])
        # LLM frameworks that stream by steps may show what was said before the calls as well.
        assert [final.endswith(FINAL) for final in finals] == [True] * num_loops, finals
        assert len(stack.coordinator.requests) == num_loops * len(TURNS)
        for request in stack.coordinator.requests[len(TURNS) - 1 :: len(TURNS)]:
            prompt = tokenizer.decode(prompt_ids(request), skip_special_tokens=False)
            system, question = prompt.index("Be brief."), prompt.index("How warm is it")
            assert system < prompt.index('"name": "get_weather"') < question
            told = [prompt.index(text, question) for text in (CALLS[0], "4 C and rain", CALLS[1], "20 C and sun")]
            assert told == sorted(told)

    runner(tokenizer, folder)(scenario, None, 4096, timeout_s=240, replies=replies)


@pytest.mark.parametrize(("script", "num_loops"), PYTHON_AGENTS.items())
def test_a_python_agent_calls_is_told_and_answers(
    script: str, num_loops: int, tmp_path: Path, smollm2_path: Path
) -> None:
    if not PYTHON.exists():
        pytest.skip("`make agents` has not installed the agent frameworks")
    command = [str(PYTHON), str(ROOT / "tests" / "agents" / script)]
    check_loops(command, num_loops, tmp_path, smollm2_path)


def test_the_vercel_ai_sdk_calls_is_told_and_answers(tmp_path: Path, smollm2_path: Path, node_package: Path) -> None:
    check_loops(["node", str(node_package / "agent.mjs")], 2, tmp_path, smollm2_path)
