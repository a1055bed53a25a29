"""Handovers: how a replica writes the body of a streamed answer straight to the client's connection.

Ray Serve carries every part of a response as an object of its own, through two event loops and a pickle at each end:
0.4 ms of processor time a token. Where proxy and replica share a node, the proxy hands the replica a duplicate of the
client's socket instead (SCM_RIGHTS, over a unix socket), once it has written the head of the response and the first
part of its body. The replica writes all others, the proxy the end. Everything else, routing, headers, cancellation,
stays Serve's.

The proxy names its address and an offer in a header of the request; both are random, and both ends check the other's
user. A replica that cannot reach the address, or gets no socket, answers through Serve.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable

from parallel.sockets import is_ours

logger = logging.getLogger(__name__)

HEADER = b"x-lockstep-handover"
"""Header that says in a request where a socket is offered, and in its response that the replica took the offer."""
_VALUE = re.compile(rb"(lockstep-proxy-\d{1,10}-[0-9a-f]{32})/(\d{1,20})")
# All that is ever sent: by the replica to claim an offer, by the proxy with the socket or, to refuse, without it.
_OFFER = struct.Struct("<Q")
_FD_SIZE = array.array("i").itemsize
_CLAIM_S = 1.0
_SOCKET_S = 10.0
_BACKLOG = 256


# ---- the proxy's end


class Offer:
    """The socket of one request's client, for the replica that answers the request."""

    def __init__(self, hub: HandoverHub, transport: asyncio.Transport) -> None:
        self.id = secrets.randbits(63)
        self._hub = hub
        self._transport = transport
        self._claimed = asyncio.Event()
        self._replica: socket.socket | None = None

    @property
    def header(self) -> bytes:
        """The header's value that names it."""
        return f"{self._hub.name}/{self.id}".encode()

    def claim(self, replica: socket.socket) -> None:
        """A replica wants it."""
        if self._replica is None:
            self._replica = replica
            self._claimed.set()

    async def hand_over(self) -> None:
        """Gives the replica the socket, or tells it to go on without.

        To be called when the first part of a response was written that says that a replica took the offer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLAIM_S):
                await self._claimed.wait()
        if self._replica is not None:
            self._hub.send(self._replica, self.id, await self._flushed_socket())

    async def _flushed_socket(self) -> int | None:
        """The socket's descriptor, when nothing waits to be written to it: the replica's bytes would overtake that."""
        for _ in range(3):  # uvloop writes at the end of a turn
            if self._transport.is_closing():
                break
            if not self._transport.get_write_buffer_size():
                return int(self._transport.get_extra_info("socket").fileno())
            await asyncio.sleep(0)
        return None


class HandoverHub:
    """The place where all replicas claim the sockets that one proxy offers."""

    def __init__(self) -> None:
        self.name = f"lockstep-proxy-{os.getpid()}-{secrets.token_hex(16)}"
        self._offers: dict[int, Offer] = {}
        self._listener: socket.socket | None = None
        self._replicas: set[socket.socket] = set()

    def open(self) -> None:
        """Takes claims from now on, on the running loop; calling it again does nothing."""
        if self._listener is None:
            # Datagrams that are connected: a socket belongs to its message, and an end is noticed.
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def close(self) -> None:
        """Takes no more claims, and leaves the replicas."""
        if self._listener is not None:
            _close(self._listener)
        for replica in list(self._replicas):
            self._drop(replica)

    def offer(self, transport: asyncio.Transport) -> Offer:
        """Offers a client's socket, until it is withdrawn."""
        offer = Offer(self, transport)
        self._offers[offer.id] = offer
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Forgets an offer; a socket that was handed over stays with the replica."""
        del self._offers[offer.id]

    def send(self, replica: socket.socket, offer_id: int, fd: int | None) -> None:
        """Sends a descriptor, or a refusal, to the replica that claimed the offer."""
        sent = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            replica.sendmsg([_OFFER.pack(offer_id)], sent)
        except OSError as error:
            logger.warning("a client's socket could not be handed over: %s", error.strerror)
            self._drop(replica)  # the replica notices, and writes by Serve

    def _accept(self, listener: socket.socket) -> None:
        try:
            replica, _ = listener.accept()
        except OSError:
            return
        if not is_ours(replica):
            logger.warning("the claims of another user were refused")
            replica.close()
            return
        replica.setblocking(False)
        self._replicas.add(replica)
        asyncio.get_running_loop().add_reader(replica, self._read_claim, replica)

    def _read_claim(self, replica: socket.socket) -> None:
        try:
            message = replica.recv(_OFFER.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if len(message) != _OFFER.size:
            self._drop(replica)
        elif (offer := self._offers.get(_OFFER.unpack(message)[0])) is not None:
            offer.claim(replica)

    def _drop(self, replica: socket.socket) -> None:
        if replica in self._replicas:
            self._replicas.discard(replica)
            _close(replica)


# ---- the replica's end


class ClientSocket:
    """The connection of one client, for the parts of one chunked response.

    It takes a part when the one before it is sent: nothing piles up for a client that reads slowly.
    """

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, a connected socket that does not block."""
        self._sock = socket.socket(fileno=fd)
        self._unsent = memoryview(b"")  # a rest of it is no copy

    def send(self, part: bytes) -> bool:
        """Sends as much of a part as the client has room for; whether that was all.

        Raises:
            ConnectionError: the client is gone, or the part before this one is not sent.
        """
        if self._unsent:
            raise ConnectionError("the part before this one is not sent")
        if not part:
            return True  # a chunk of no bytes would be the end of the body
        self._unsent = memoryview(b"%x\r\n%b\r\n" % (len(part), part))
        return self._send()

    async def flush(self) -> None:
        """Sends the rest of the last part as the client makes room. Raises ConnectionError when it is gone."""
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        while self._unsent and not self._send():
            writable.clear()
            loop.add_writer(self._sock, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(self._sock)

    def close(self) -> None:
        """Lets the socket go. Nothing can follow a part of which something is not sent: then the connection ends."""
        if self._unsent:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send(self) -> bool:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return False
        return not self._unsent


class Claim:
    """A replica's claim of one client's socket. Whoever made it closes it."""

    def __init__(self, received: asyncio.Future[ClientSocket | None]) -> None:
        self._received = received

    async def socket(self) -> ClientSocket | None:
        """The socket, once the proxy has written the first part; None: all parts go through Ray Serve."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SOCKET_S):
                return await self._received
        return None

    def close(self) -> None:
        """Lets the socket go, also one that is still to come."""
        if not self._received.done():
            self._received.cancel()
        elif not self._received.cancelled() and (client := self._received.result()) is not None:
            client.close()


class Handovers:
    """A replica's claims, at every proxy that offered it something."""

    def __init__(self) -> None:
        self._proxies: dict[bytes, _Proxy] = {}  # by address

    def claim(self, headers: list[tuple[bytes, bytes]]) -> Claim | None:
        """Claims what a request's headers offer; None when that is nothing, or out of reach."""
        values = [value for name, value in headers if name == HEADER]
        match = _VALUE.fullmatch(values[0]) if len(values) == 1 else None
        if match is None or (offer_id := int(match[2])) >= 1 << 63:
            return None
        address = match[1]
        if address not in self._proxies:
            sock = _connected(address)
            if sock is None:
                return None
            self._proxies[address] = _Proxy(sock, lambda: self._proxies.pop(address, None))
        return self._proxies[address].claim(offer_id)


class _Proxy:
    """A replica's connection to one proxy."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], object]) -> None:
        self._sock = sock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[ClientSocket | None]] = {}
        self._loop.add_reader(sock, self._read)

    def claim(self, offer_id: int) -> Claim | None:
        try:
            self._sock.send(_OFFER.pack(offer_id))
        except BlockingIOError:
            return None  # it does not read
        except OSError:
            self._lose()
            return None
        received = self._waiting[offer_id] = self._loop.create_future()
        received.add_done_callback(lambda _: self._waiting.pop(offer_id, None))
        return Claim(received)

    def _read(self) -> None:
        try:
            message, ancillary, _, _ = self._sock.recvmsg(
                _OFFER.size, socket.CMSG_SPACE(_FD_SIZE), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            message, ancillary = b"", []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
        if len(message) != _OFFER.size:
            self._lose()
            return
        received = self._waiting.get(_OFFER.unpack(message)[0])
        client = ClientSocket(fds[0]) if fds else None
        if received is not None and not received.done():
            received.set_result(client)
        elif client is not None:
            client.close()  # whoever waited has left

    def _lose(self) -> None:
        self._on_lost()
        _close(self._sock)
        for received in list(self._waiting.values()):
            if not received.done():
                received.set_result(None)


def _connected(address: bytes) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(b"\0" + address)  # a listening unix socket answers at once
        if is_ours(sock):
            return sock
        logger.warning("the offers of another user's proxy were refused")
    except OSError as error:
        logger.debug("a stream goes through Ray Serve, whose proxy is out of reach: %s", error.strerror)
    sock.close()
    return None


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the loop, or its reader, is gone
        asyncio.get_running_loop().remove_reader(sock)
    sock.close()
