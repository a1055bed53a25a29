"""Run as `python -O -m tests.refusals MODEL.gguf`: bad requests are refused where `assert` means nothing, and nothing
is unpickled on the way. Ends with status 1 and a line for each that is not."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.openai.tokenizer import Tokenizer
from tests.scripted_engine import Stack, runner

REFUSED: list[dict[str, Any]] = [
    {"temperature": 3},
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"n": 0},
    {"n": 10**6},
    {"max_tokens": 0},
    {"max_tokens": 10**6},
    {"seed": 2**63},
    {"stop": [""]},
    {"stop": ["a"] * 100},
    {"stop_token_ids": [10**9]},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"1": "x"}},
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [49152]},
    {"prompt": [[1], [49152]]},
    {"prompt": [5] * 200},
    {"min_tokens": -1},
    {"frequency_penalty": 3},
    {"repetition_penalty": 0},
    {"allowed_token_ids": [49152]},
    {"logprobs": 1000},
]


def forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        raise RuntimeError(f"a pickle asks for {arguments}")


def main() -> None:
    if __debug__:
        sys.exit("run with -O")
    wrong: list[str] = []

    async def scenario(stack: Stack) -> None:
        sys.addaudithook(forbid)
        for fields in REFUSED:
            response = await stack.complete(**fields)
            if response.status_code != 400 or "error" not in response.json():
                wrong.append(f"{fields}: {response.status_code} {response.text[:200]}")
        for body in (b"{", b"[]", b"\x80\x04\x95.", b"[" * 10_000, b'{"model": 5}'):
            response = await stack.http.post("/v1/completions", content=body)
            if response.status_code != 400:
                wrong.append(f"{body[:20]!r}: {response.status_code}")
        if stack.coordinator.requests:
            wrong.append(f"{len(stack.coordinator.requests)} requests reached the engine")
        response = await stack.complete()
        if response.status_code != 200:
            wrong.append(f"a good request: {response.text}")

    with tempfile.TemporaryDirectory() as folder:
        runner(Tokenizer.load(Path(sys.argv[1])), Path(folder))(scenario)
    sys.stdout.write("\n".join(wrong) or "refused as they should be")
    asyncio.set_event_loop(None)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
