"""The ingress's part of a token's way: from the coordinator's send of a step to the client's receipt of its bytes.

    python -m benchmarks.ingress_lag TOKENIZER [--via replica|serve] [--streams 128] [--steps 200] [--step-ms 50]

A scripted coordinator sends a token to every stream at fixed times and notes when it did. The clients, in a process of
their own, note when each arrives; all are processes of one host and read one monotonic clock. The same is done without
an ingress: the coordinator writes the same bytes to the clients' sockets itself. The difference is what the ingress
adds. TOKENIZER is a directory.
  replica  clients connect to the Engine replica's app behind uvicorn: the ingress itself
  serve    clients connect to Ray Serve, started here: its HAProxy, or with RAY_SERVE_ENABLE_HA_PROXY=0 in the
           environment its own proxy in Python, asks a replica with the same app
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import uvicorn
import uvloop

from benchmarks.report import circumstances
from cluster.messages.engine import EngineToCoordinator, Finished, FinishReason, StepOutput, Submit
from cluster.openai.wire import Completion, CompletionChoice
from cluster.requests.engine_client import EngineClient
from cluster.requests.json_parts import event_parts
from cluster.requests.served_model import ServedModel
from cluster.serve.haproxy import REPLICA_SETTINGS, use_haproxy
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from parallel.sockets import pack_frame, read_frame

MODEL = "m"
_SETTLE_S = 1.0
_TEXT = b'"text":"'


async def scripted_coordinator(path: str, token: int, num_streams: int, num_steps: int, step_s: float) -> list[float]:
    """Sends `num_steps` steps of `token` to `num_streams` requests over socket `path`; when each was sent."""
    sent: list[float] = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(EngineToCoordinator)
        encoder = msgspec.msgpack.Encoder()
        ids: list[int] = []
        while len(ids) < num_streams:
            message = decoder.decode(await read_frame(reader))
            if isinstance(message, Submit):
                ids += [request.id for request in message.requests()]
        await asyncio.sleep(_SETTLE_S)
        raw_ids = np.array(ids, "<i8").tobytes()
        tokens = np.full(num_streams, token, "<i4").tobytes()
        began = time.monotonic()
        for step in range(num_steps):
            ends = [Finished(id=i, reason=FinishReason.LENGTH) for i in ids] if step == num_steps - 1 else []
            frame = pack_frame(encoder.encode(StepOutput(ids=raw_ids, tokens=tokens, finished=ends)))
            await asyncio.sleep(max(0.0, began + step * step_s - time.monotonic()))
            sent.append(time.monotonic())
            writer.write(frame)
        await asyncio.sleep(_SETTLE_S)
        done.set()

    server = await asyncio.start_unix_server(serve, path)
    await done.wait()
    server.close()
    return sent


def run_coordinator(path: str, token: int, num_streams: int, num_steps: int, step_s: float, out: Connection) -> None:
    out.send(asyncio.run(scripted_coordinator(path, token, num_streams, num_steps, step_s)))


def run_without_ingress(num_streams: int, num_steps: int, step_s: float, out: Connection) -> None:
    """Tells its port, sends the chunks of `num_steps` tokens to clients that connect, tells when each step began."""
    sockets = []
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as server:
        out.send(server.getsockname()[1])
        while len(sockets) < num_streams:
            client, _ = server.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.recv(1 << 16)
            client.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            sockets.append(client)
    time.sleep(_SETTLE_S)
    completion = Completion("cmpl-" + "0" * 32, 0, MODEL, [CompletionChoice(0, "a", None, None)])
    part = b"".join(event_parts(completion))
    chunk = b"%x\r\n%b\r\n" % (len(part), part)
    sent = []
    began = time.monotonic()
    for step in range(num_steps):
        time.sleep(max(0.0, began + step * step_s - time.monotonic()))
        sent.append(time.monotonic())
        for client in sockets:
            client.send(chunk)
    time.sleep(_SETTLE_S)
    out.send(sent)


async def connected_model(path: str, tokenizer: str, num_steps: int) -> ServedModel:
    """A model whose engine is the scripted coordinator."""
    engine = await EngineClient.connect(path)
    loaded = Tokenizer.load(Path(tokenizer))
    gc.collect()
    gc.freeze()  # the Engine replica does so
    return ServedModel(engine, loaded, model_name=MODEL, max_model_len=num_steps + 256, server=ServerConfig())


def run_replica(path: str, tokenizer: str, num_steps: int, port: int) -> None:
    """The Engine replica's HTTP side behind uvicorn, until it is killed."""

    async def serve() -> None:
        app = create_app(await connected_model(path, tokenizer, num_steps))
        config = uvicorn.Config(app, port=port, log_config=None, lifespan="off")
        await uvicorn.Server(config).serve()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve())  # Ray's processes do so


class _Stream(asyncio.Protocol):
    """One client: notes when the bytes of each token came."""

    def __init__(self, request: bytes, num_tokens: int) -> None:
        self.arrived: list[float] = []
        self.num_events = 0
        self.failed: bytes | None = None
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._num_tokens = num_tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]  # uvloop's is no asyncio.WriteTransport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.arrived and b" 200 " not in data[:20] and data.startswith(b"HTTP"):
            self.failed = data[:300]
            self.done.set_result(None)
            return
        start = data.find(_TEXT)
        while start >= 0:
            start += len(_TEXT)
            end = data.index(b'"', start)
            self.arrived += [now] * (end - start)  # one letter a token
            self.num_events += end > start
            start = data.find(_TEXT, end)
        if len(self.arrived) >= self._num_tokens and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.failed = repr(exc).encode()
            self.done.set_result(None)


async def follow(host: str, port: int, num_streams: int, num_tokens: int) -> tuple[list[list[float]], int]:
    """When each token of each of `num_streams` streams came, and how many events carried them."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    request = f"{head}\r\n\r\n".encode() + raw
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(num_streams):
        _, stream = await loop.create_connection(lambda: _Stream(request, num_tokens), host, port)
        streams.append(stream)
    await asyncio.gather(*(stream.done for stream in streams))
    for stream in streams:
        if stream.failed is not None:
            raise RuntimeError(f"a stream ended early: {stream.failed!r}")
    return [stream.arrived for stream in streams], sum(stream.num_events for stream in streams)


def run_clients(host: str, port: int, num_streams: int, num_tokens: int, out: Connection) -> None:
    out.send(uvloop.run(follow(host, port, num_streams, num_tokens)))


@contextlib.contextmanager
def replica(path: str, tokenizer: str, num_steps: int) -> Iterator[tuple[str, int]]:
    """Host and port of the app behind uvicorn."""
    port = _free_port()
    process = multiprocessing.Process(target=run_replica, args=(path, tokenizer, num_steps, port))
    process.start()
    try:
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def behind_serve(path: str, tokenizer: str, num_steps: int) -> Iterator[tuple[str, int]]:
    """Host and port of Ray Serve with the app in a replica."""
    use_haproxy()
    os.environ.update(REPLICA_SETTINGS)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    import ray  # it reads these when it is imported
    from ray import serve

    class Replica:
        async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
            self._model = await connected_model(path, tokenizer, num_steps)

        def __serve_build_asgi_app__(self) -> Any:
            return create_app(self._model, names_responses=False)

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4)
    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment = serve.deployment(max_ongoing_requests=4096)(serve.ingress()(Replica))
    serve.run(deployment.bind(), route_prefix="/")
    try:
        yield "127.0.0.1", port
    finally:
        serve.shutdown()
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_open(host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://{host}:{port}/health", trust_env=False).is_success:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing answers at {host}:{port}")
        time.sleep(0.1)


def follow_steps(
    host: str, port: int, num_streams: int, num_steps: int, from_coordinator: Connection
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int]:
    """When each token of each stream came, when each step was sent, and how many events carried the tokens."""
    receive, send = multiprocessing.Pipe(duplex=False)
    clients = multiprocessing.Process(target=run_clients, args=(host, port, num_streams, num_steps, send))
    clients.start()
    sent = np.array(from_coordinator.recv())
    arrived, num_events = receive.recv()
    clients.join()
    return np.array(arrived), sent, num_events


def measure_direct(num_streams: int, num_steps: int, step_s: float) -> npt.NDArray[np.float64]:
    """[streams, steps] seconds of each token's way without an ingress."""
    from_coordinator, to_parent = multiprocessing.Pipe(duplex=False)
    arguments = (num_streams, num_steps, step_s, to_parent)
    coordinator = multiprocessing.Process(target=run_without_ingress, args=arguments)
    coordinator.start()
    arrived, sent, _ = follow_steps("127.0.0.1", from_coordinator.recv(), num_streams, num_steps, from_coordinator)
    coordinator.join()
    return arrived - sent[None, :]


def measure(via: str, tokenizer: str, num_streams: int, num_steps: int, step_s: float) -> dict[str, Any]:
    """Figures of one run."""
    direct = measure_direct(num_streams, num_steps, step_s)
    [token] = Tokenizer.load(Path(tokenizer)).encode("a", add_special_tokens=False)
    opened = {"replica": replica, "serve": behind_serve}[via]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/engine.sock"
        from_coordinator, to_parent = multiprocessing.Pipe(duplex=False)
        arguments = (path, token, num_streams, num_steps, step_s, to_parent)
        coordinator = multiprocessing.Process(target=run_coordinator, args=arguments)
        coordinator.start()
        with opened(path, tokenizer, num_steps) as (host, port):
            _wait_until_open(host, port)
            arrived, sent, num_events = follow_steps(host, port, num_streams, num_steps, from_coordinator)
        coordinator.join()
    lag = arrived - sent[None, :]
    rates = (num_steps - 1) / (arrived[:, -1] - arrived[:, 0])
    shown, shown_direct = _percentiles_ms(lag), _percentiles_ms(direct)
    return {
        "via": via,
        "streams": num_streams,
        "steps": num_steps,
        "step_ms": step_s * 1e3,
        "lag_ms": shown,
        "lag_without_ingress_ms": shown_direct,
        "added_ms": {name: round(shown[name] - shown_direct[name], 3) for name in shown},
        "first_stream_of_a_step_ms": round(float(np.median(lag.min(axis=0))) * 1e3, 3),
        "events_a_token": round(num_events / lag.size, 3),
        "slowest_rate_over_median": round(float(rates.min() / np.median(rates)), 3),
    }


def _percentiles_ms(lag_s: npt.NDArray[np.float64]) -> dict[str, float]:
    return {
        name: round(float(np.percentile(lag_s, q)) * 1e3, 3) for name, q in (("median", 50), ("p90", 90), ("p99", 99))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--via", choices=("replica", "serve"), default="replica")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    report = measure(args.via, args.tokenizer, args.streams, args.steps, args.step_ms / 1e3) | circumstances()
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
