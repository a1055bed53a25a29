"""Everything that one API key does to an endpoint to harm the others, at random. A process of its own, so that its work
does not disturb who measures:

python -m tests.helpers.abuser URL MODEL KEY SECONDS SEED

ABUSE_WAYS, an environment variable, names what it does, e.g. `flood,leave`: everything where it is not set.
Prints how often it did what, and the statuses of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

_LOWEST = -(2**53) + 1
_NUM_AT_ONCE = 6
"""Things that it does at the same time."""


class Abuser:
    """One client without scruples."""

    def __init__(self, url: str, model: str, key: str, seed: int) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._model = model
        self._key = key
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)
        self.done: Counter[str] = Counter()
        self.statuses: Counter[int | str] = Counter()

    async def run(self, seconds: float) -> None:
        """Does harm for so long."""
        deadline = time.monotonic() + seconds
        ways: list[Callable[[], Awaitable[None]]] = [
            self._take_every_row,
            self._flood,
            self._leave,
            self._send_huge_bodies,
            self._send_many_messages,
            self._open_halfway,
            self._send_long_prompts,
            self._read_slowly,
        ]
        if (names := os.environ.get("ABUSE_WAYS")) is not None:
            ways = [way for way in ways if way.__name__.strip("_") in names.split(",")]

        async def go_on() -> None:
            while (left := deadline - time.monotonic()) > 0:
                way = self._random.choice(ways)
                self.done[way.__name__] += 1
                with contextlib.suppress(TimeoutError, httpx.HTTPError, OSError):
                    async with asyncio.timeout(min(left, 90)):
                        await way()

        await asyncio.gather(*(go_on() for _ in range(_NUM_AT_ONCE)))
        await self._http.aclose()

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "prompt": "Rivers are", "priority": _LOWEST, "ignore_eos": True, **fields}

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self._http.post(path, content=raw, headers={"content-type": "application/json"})
        self.statuses[reply.status_code] += 1

    async def _take_every_row(self) -> None:
        await self._post("/v1/completions", self._body(n=32, max_tokens=self._random.choice([100, 1000, 4000])))

    async def _flood(self) -> None:
        await asyncio.gather(*(self._post("/v1/completions", self._body(max_tokens=1)) for _ in range(200)))

    async def _leave(self) -> None:
        for _ in range(30):
            body = self._body(n=self._random.choice([1, 8]), max_tokens=2000, stream=True)
            async with self._http.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_raw():
                    if self._random.random() < 0.3:
                        break

    async def _send_huge_bodies(self) -> None:
        text = "river " * 700_000
        for body in (
            self._body(prompt=text),
            self._body(prompt=[text, text]),
            self._body(prompt=list(range(1, 1_000_000))),
            self._body(stop_token_ids=list(range(500_000))),
            self._body(logit_bias={str(index): 1 for index in range(300_000)}),
        ):
            await self._post("/v1/completions", body)

    async def _send_many_messages(self) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 21_500
        await self._post("/v1/chat/completions", {"model": self._model, "messages": messages, "max_tokens": 1})

    async def _open_halfway(self) -> None:
        heads = [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"GET", b"", self._raw(b"")[:-2], self._raw(b'{"mod')]
        writers: list[asyncio.StreamWriter] = []
        try:
            for _ in range(300):
                _, writer = await asyncio.open_connection(self._host, self._port)
                writers.append(writer)
                writer.write(self._random.choice(heads))
            await asyncio.sleep(self._random.choice([1, 20]))
        finally:
            for writer in writers:
                writer.transport.abort()

    async def _send_long_prompts(self) -> None:
        for _ in range(6):
            prompt = [self._random.randrange(100, 40_000) for _ in range(self._random.choice([2000, 8000]))]
            await self._post("/v1/completions", self._body(prompt=prompt, max_tokens=self._random.choice([1, 100])))

    async def _read_slowly(self) -> None:
        body = json.dumps(self._body(n=8, max_tokens=2000, stream=True)).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 10)
        try:
            writer.write(self._raw(body))
            for _ in range(60):
                if not await reader.read(64):
                    break
                await asyncio.sleep(0.5)
        finally:
            writer.transport.abort()

    def _raw(self, body: bytes) -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body) or 99}\r\n\r\n".encode() + body


async def _main(url: str, model: str, key: str, seconds: float, seed: int) -> None:
    abuser = Abuser(url, model, key, seed)
    await abuser.run(seconds)
    sys.stdout.write(json.dumps({"did": abuser.done, "statuses": abuser.statuses}) + "\n")


if __name__ == "__main__":
    os.nice(19)  # no lower than the server's processes: Ray's run at 15, and real clients take none of its cores
    asyncio.run(_main(*sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5])))  # type: ignore[arg-type]
