"""One generation's channel between the coordinator and its ranks: frames to all ranks, results from rank 0."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from configs.schema import ParallelConfig
from parallel.channel.ring import FrameReader, FrameWriter, Ring
from parallel.channel.tcp_channel import TcpListener, TcpReader, TcpWriter

# Maximum microseconds that the coordinator spins, because its waits last a step and would take a core from the ranks.
_MOST_SPIN_US = 50
_SLOTS = 8  # more than the steps in flight, so that the writer never waits


@dataclass(frozen=True)
class StepChannel:
    """The coordinator's ends of the channel."""

    frames: FrameWriter
    results: FrameReader
    rings: tuple[Ring, ...] = ()
    """The shared memory for frames and for results. Empty if the ranks are on several nodes."""

    @classmethod
    def over_shared_memory(
        cls, num_ranks: int, max_message_bytes: int, parallel: ParallelConfig, attach: Callable[..., object]
    ) -> StepChannel:
        """Connects ranks on this node. `attach(method, *args)` calls a method of all ranks."""
        assert parallel.spin_us is not None, "spin_us is resolved before the ranks start"
        spin_us = min(parallel.spin_us, _MOST_SPIN_US)
        frames, results = rings = tuple(
            Ring.create(num_readers=num_readers, slots=_SLOTS, slot_bytes=max_message_bytes, spin_us=spin_us)
            for num_readers in (num_ranks, 1)
        )
        attach("attach_ring", frames.address, results.address)
        return cls(frames.writer(), results.reader(0), rings)

    @classmethod
    def over_tcp(
        cls, num_ranks: int, max_message_bytes: int, parallel: ParallelConfig, attach: Callable[..., object], host: str
    ) -> StepChannel:
        """Connects all ranks over TCP, including those on this node."""
        timeout_s = parallel.init_timeout_s
        frames, results = TcpListener.create(host), TcpListener.create(host)
        # The ranks connect while this process accepts. If a rank fails, `attach` raises its error.
        accepting = ThreadPoolExecutor(2)
        to_ranks = accepting.submit(frames.accept, num_ranks, timeout_s=timeout_s)
        from_rank_0 = accepting.submit(results.accept, 1, timeout_s=timeout_s)
        attach("attach_tcp", frames.address, results.address, max_message_bytes)
        channel = cls(
            TcpWriter(to_ranks.result(timeout_s), max_frame_bytes=max_message_bytes),
            TcpReader(from_rank_0.result(timeout_s)[0], max_frame_bytes=max_message_bytes),
        )
        accepting.shutdown()
        frames.close()
        results.close()
        return channel

    def heartbeat_ages(self, num_ranks: int) -> list[float]:
        """Seconds since each rank last took or awaited a frame. Empty if the ranks are on several nodes."""
        return [ring.reader_status(rank).heartbeat_age_s for ring in self.rings[:1] for rank in range(num_ranks)]

    def close(self) -> None:
        """Releases the shared memory. Threads of this process that wait for a message get an error."""
        for ring in self.rings:
            ring.close()
