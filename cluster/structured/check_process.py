"""The program that checks grammars: `python -m cluster.structured.check_process`, with a socket as standard input.

The first process reads the tokenizer and checks nothing itself. It forks a child for the checks. A grammar that takes
too much CPU time or memory, or breaks the compiler, may end the child; the first process then forks another one in
milliseconds. Forking is safe here: there is a single thread, which has only read the tokenizer.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from typing import NoReturn

import msgspec

from cluster.structured.checker_messages import Checked, Died, Refused, Reply, Setup, pack
from cluster.structured.compiler import GrammarCompiler
from cluster.structured.grammar_limits import CHECK_CPU_S, CHECK_MEMORY_BYTES
from cluster.structured.matchers import MatchError, Matchers
from cluster.structured.spec import GrammarSpec
from configs.errors import RequestError
from parallel.sockets import receive_frame

# Lower CPU priority, so that without free cores a new request's grammar waits instead of running answers.
_NICENESS = 5


class _Checks:
    """Compiles grammars for one model and computes their first masks."""

    def __init__(self, setup: Setup) -> None:
        """Raises ValueError if llguidance cannot use the tokenizer."""
        self._matchers = Matchers(setup)
        added = msgspec.json.decode(setup.tokenizer).get("added_tokens", [])
        self._compiler = GrammarCompiler({token["content"]: token["id"] for token in added if token.get("special")})

    def reply(self, spec: GrammarSpec) -> Reply:
        """Checks `spec` and returns the result. A bad grammar may end the process."""
        try:
            grammar = self._compiler.compile(spec)
            try:
                mask = self._matchers.mask(self._matchers.build(grammar))
            except MatchError as error:
                raise RequestError(f"The grammar cannot be used; correct it: {error}") from None
            if mask is None:
                raise RequestError("The grammar matches the empty text alone; let it match some text.")
        except RequestError as error:
            return Refused(str(error), error.code, error.param or spec.param)
        return Checked(grammar)


def main() -> None:
    """Serves until the other end of the socket closes."""
    os.nice(_NICENESS)
    sock = socket.socket(fileno=sys.stdin.fileno())
    setup = receive_frame(sock)
    if setup is None:
        return
    try:
        checks: _Checks | str = _Checks(msgspec.msgpack.decode(setup, type=Setup))
    except ValueError as error:
        checks = f"Structured output is not available with this model's tokenizer: {error}"
    gc.collect()
    gc.freeze()  # a garbage collection would touch, and so copy, every page with an object
    checking = mmap.mmap(-1, 1)  # shared with the child: 1 while a check has no reply yet
    while True:
        if (pid := os.fork()) == 0:
            _serve(sock, checks, checking)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        if not checking[0]:
            continue  # nobody waits for a reply, and it would be taken for the next grammar's
        checking[0] = False
        reason = "takes too much time" if code == -signal.SIGPROF else "takes too much memory, or breaks the compiler"
        try:
            sock.sendall(pack(Died(reason)))
        except OSError:
            return


def _serve(sock: socket.socket, checks: _Checks | str, checking: mmap.mmap) -> NoReturn:
    """Checks grammars in the child until the other end closes. `checks` is an error if the tokenizer cannot be used."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + CHECK_MEMORY_BYTES,) * 2)
        while (frame := receive_frame(sock)) is not None:
            checking[0] = True
            spec = msgspec.msgpack.decode(frame, type=GrammarSpec)
            if isinstance(checks, str):
                reply: Reply = Refused(checks, "unsupported_parameter", spec.param)
            else:
                signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
                reply = checks.reply(spec)
                # The time limit ends before the reply is written, because half a reply would be taken for the beginning
                # of another.
                signal.setitimer(signal.ITIMER_PROF, 0)
            checking[0] = False
            sock.sendall(pack(reply))
        status = 0
    except OSError:
        status = 0  # the other end is gone
    except BaseException:  # noqa: BLE001 -- said here, since nothing runs after this process
        traceback.print_exc()
    finally:
        os._exit(status)  # skips the cleanup of the first process's objects


def _address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
