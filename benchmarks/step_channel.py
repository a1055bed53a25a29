"""Round trip of the step channel: one frame out to every reader, an acknowledgement back from each.

    python -m benchmarks.step_channel [--readers 1 2 4] [--bytes 1024 51200] [--spin-us N] [--rounds N]

Readers are forked processes; acknowledgements are 8-byte frames on a ring (or connection) of each reader's own. spin 0
means that a waiting end sleeps at once; readers spin only where every process has a core of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence

from parallel.channel.ring import FrameReader, FrameWriter, Ring
from parallel.channel.tcp_channel import TcpListener, TcpReader, TcpWriter, connect

MAX_BYTES = 256 << 10
DEADLINE_S = 30.0


def serve(reader: FrameReader, writer: FrameWriter) -> None:
    """Acknowledges every frame until an empty one comes."""
    while reader.recv(DEADLINE_S):
        writer.send(b"received", DEADLINE_S)
    reader.close()


def ring_reader(frames: str, acks: str, index: int) -> None:
    serve(Ring.attach(frames).reader(index), Ring.attach(acks).writer())


def tcp_reader(frames: str, acks: str, index: int) -> None:
    serve(
        TcpReader(connect(frames, index, timeout_s=DEADLINE_S), max_frame_bytes=MAX_BYTES),
        TcpWriter([connect(acks, index, timeout_s=DEADLINE_S)], max_frame_bytes=MAX_BYTES),
    )


def measure_ring(num_readers: int, sizes: Sequence[int], spin_us: int, rounds: int) -> list[tuple[float, float]]:
    """(p50, p99) in microseconds for each frame size."""
    frames = Ring.create(num_readers=num_readers, slots=64, slot_bytes=MAX_BYTES, spin_us=spin_us)
    acks = [Ring.create(num_readers=1, slots=64, slot_bytes=4096, spin_us=spin_us) for _ in range(num_readers)]
    processes = start(ring_reader, frames.address, [ring.address for ring in acks])
    answer = time_rounds(frames.writer(), [ring.reader(0) for ring in acks], sizes, rounds)
    stop(processes)
    return answer


def measure_tcp(num_readers: int, sizes: Sequence[int], rounds: int) -> list[tuple[float, float]]:
    """(p50, p99) in microseconds for each frame size."""
    frames, acks = TcpListener.create("127.0.0.1"), TcpListener.create("127.0.0.1")
    processes = start(tcp_reader, frames.address, [acks.address] * num_readers)
    writer = TcpWriter(frames.accept(num_readers, timeout_s=DEADLINE_S), max_frame_bytes=MAX_BYTES)
    readers = [
        TcpReader(connection, max_frame_bytes=MAX_BYTES)
        for connection in acks.accept(num_readers, timeout_s=DEADLINE_S)
    ]
    answer = time_rounds(writer, readers, sizes, rounds)
    stop(processes)
    return answer


def start(
    target: Callable[[str, str, int], None], frames: str, acks: Sequence[str]
) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("fork")
    processes: list[multiprocessing.process.BaseProcess] = [
        context.Process(target=target, args=(frames, address, index)) for index, address in enumerate(acks)
    ]
    for process in processes:
        process.start()
    return processes


def stop(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.join()


def time_rounds(
    writer: FrameWriter, acks: Sequence[FrameReader], sizes: Sequence[int], rounds: int
) -> list[tuple[float, float]]:
    answer = []
    for size in sizes:
        frame = os.urandom(size)
        times = []
        for _ in range(rounds + 50):
            start_s = time.perf_counter()
            writer.send(frame, DEADLINE_S)
            for reader in acks:
                reader.recv(DEADLINE_S)
            times.append(time.perf_counter() - start_s)
        times = sorted(times[50:])
        answer.append((1e6 * times[len(times) // 2], 1e6 * times[int(len(times) * 0.99)]))
    writer.send(b"", DEADLINE_S)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 50 << 10])
    parser.add_argument("--spin-us", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3000)
    args = parser.parse_args()

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, round trip p50/p99 us")
    print(f"{'readers':>7} {'transport':>14} " + " ".join(f"{size:>13} B" for size in args.bytes))
    for num_readers in args.readers:
        rows = [("ring, sleep", measure_ring(num_readers, args.bytes, 0, args.rounds))]
        if num_readers + 1 <= cores:
            rows.append(
                (f"ring, spin {args.spin_us}", measure_ring(num_readers, args.bytes, args.spin_us, args.rounds))
            )
        rows.append(("tcp", measure_tcp(num_readers, args.bytes, args.rounds)))
        for name, cells in rows:
            text = " ".join(f"{p50:>7.0f}/{p99:>7.0f}" for p50, p99 in cells)
            print(f"{num_readers:>7} {name:>14} {text}", flush=True)


if __name__ == "__main__":
    main()
