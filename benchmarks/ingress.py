"""The time that the Engine replica's process spends per streamed token: read a step, decode, write the SSE chunk, send
it.

    python benchmarks/ingress.py TOKENIZER [NUM_STREAMS] [NUM_STEPS]

No network and no model: steps are fed to the client's own dispatch, and the ASGI `send` does nothing. TOKENIZER is a
directory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time

import msgspec
import numpy as np
from starlette.types import Message

from cluster.messages.engine import Finished, FinishReason, StepOutput
from cluster.requests.engine_client import EngineClient
from cluster.requests.served_model import ServedModel
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from parallel.sockets import pack_frame


async def stream_all(
    tokenizer: Tokenizer, path: str, num_streams: int, num_steps: int, stop: list[str]
) -> tuple[float, int]:
    """(CPU seconds, body chunks sent) of `num_streams` chat streams of `num_steps` tokens each, over socket `path`."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(lambda _, writer: writers.append(writer), path)
    engine = await EngineClient.connect(path)
    model = ServedModel(
        engine, tokenizer, model_name="m", max_model_len=num_steps + 256, server=ServerConfig(max_stop=4)
    )
    app = create_app(model)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": num_steps}
    raw = json.dumps({**body, "stop": stop}).encode()
    num_sent = 0

    async def call() -> None:
        messages = iter([{"type": "http.request", "body": raw}])
        forever = asyncio.Event()

        async def receive() -> Message:
            for message in messages:
                return message
            await forever.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal num_sent
            num_sent += bool(message.get("body"))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "root_path": "",
            "query_string": b"",
        }
        await app(scope, receive, send)

    calls = [asyncio.create_task(call()) for _ in range(num_streams)]
    while engine.num_open < num_streams:  # noqa: ASYNC110 -- no event for it
        await asyncio.sleep(0.001)
    ids = np.arange(1, num_streams + 1, dtype="<i8")
    rng = np.random.default_rng(0)
    encoder = msgspec.msgpack.Encoder()
    frames = []
    for step in range(num_steps):
        ends = [Finished(id=int(i), reason=FinishReason.LENGTH) for i in ids] if step == num_steps - 1 else []
        tokens = rng.integers(300, tokenizer.vocab_size, num_streams, dtype="<i4")
        output = StepOutput(ids=ids.tobytes(), tokens=tokens.tobytes(), finished=ends)
        frames.append(pack_frame(encoder.encode(output)))
    started = time.process_time()
    for frame in frames:
        writers[0].write(frame)
        await asyncio.sleep(0)  # the reader and every stream run before the next step
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    spent = time.process_time() - started
    await engine.close()
    for writer in writers:
        writer.close()
    server.close()
    return spent, num_sent


def main() -> None:
    num_streams = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    num_steps = int(sys.argv[3]) if len(sys.argv) > 3 else 400
    tokenizer = Tokenizer.load(sys.argv[1])
    for stop in ([], ["</s>", "\n\n", "User:", "###"]):
        with tempfile.TemporaryDirectory() as folder:
            spent, num_sent = asyncio.run(stream_all(tokenizer, f"{folder}/s", num_streams, num_steps, stop))
        tokens = num_streams * num_steps
        print(
            f"streams={num_streams} tokens={tokens} stops={len(stop)} sends={num_sent}: "
            f"{1e6 * spent / tokens:.1f} us a token, {1e6 * spent / num_sent:.1f} us a send"
        )


if __name__ == "__main__":
    main()
