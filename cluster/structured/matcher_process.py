"""The program that compiles grammars and computes masks: `python -m cluster.structured.matcher_process NICENESS FD...`.

The first process reads the tokenizer once and serves nothing itself. It forks one child for each socket; a child that
takes too much CPU time or memory is ended by the kernel, and the next one, forked in milliseconds, goes on where it
stopped. Forking is safe here: there is a single thread, and nothing has been done but to build the tokenizer.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.structured.checker_messages import (
    Advance,
    Check,
    Checked,
    Close,
    Died,
    Gone,
    Mask,
    Open,
    Refused,
    Reply,
    Request,
    Setup,
    pack,
)
from cluster.structured.compiler import GrammarCompiler, clean_message
from cluster.structured.grammar_limits import (
    MASK_CPU_S,
    MATCHER_MEMORY_BYTES,
    OPEN_CPU_S,
    PARSER_LIMITS,
    TOKEN_CPU_S,
)
from configs.errors import RequestError
from parallel.sockets import receive_frame

_MAX_TEMPLATES = 16


class _Session:
    """One answer that follows a grammar."""

    def __init__(self, grammar: str, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.shares_lexer = True
        """Its lexer has states that other sessions made, and may be full because of them."""
        self.tokens: list[int] = []
        self.seconds_left = MASK_CPU_S

    def take(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`, and may take some more CPU time for them."""
        self.tokens += tokens
        self.matcher.consume_tokens(list(tokens))
        self.seconds_left = min(MASK_CPU_S, self.seconds_left + TOKEN_CPU_S * len(tokens))


class MatcherServer:
    """What one child does: one request at a time, each within its CPU time."""

    def __init__(self, setup: Setup) -> None:
        """Raises ValueError for a tokenizer that llguidance cannot use."""
        eos = setup.eos_token_ids or None
        try:
            self._tokenizer = LLTokenizer(setup.tokenizer, n_vocab=setup.vocab_size, eos_token=eos)
        except ValueError:
            # It may have more ids than the model: masks are cut to the model's.
            self._tokenizer = LLTokenizer(setup.tokenizer, eos_token=eos)
        self._limits = LLParserLimits(**PARSER_LIMITS)
        self._num_words = -(-setup.vocab_size // 32)
        self._last_word = (1 << (setup.vocab_size - 1) % 32 + 1) - 1
        self._eos_mask = _mask_of(
            [id_ for id_ in self._tokenizer.eos_tokens if id_ < setup.vocab_size], self._num_words
        )
        self._compiler = GrammarCompiler(_special_tokens(setup.tokenizer))
        self._enough_bytes = _memory_bytes() + MATCHER_MEMORY_BYTES // 2  # dying of it would hit all sessions
        self._sessions: dict[int, _Session] = {}
        self._templates: OrderedDict[str, LLMatcher] = OrderedDict()

    def answer(self, request: Request) -> Reply | None:
        """The reply, unless the process dies of it."""
        match request:
            case Check(spec, cpu_s):
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
                try:
                    return Checked(self._checked(self._compiler.compile(spec)))
                except RequestError as error:
                    return Refused(str(error), error.code, error.param or spec.param)
            case Open(id_, grammar, tokens):
                if _memory_bytes() > self._enough_bytes:
                    return Mask(b"", error="too many long grammars are in use; try again later")
                answer = array("i", tokens)
                signal.setitimer(signal.ITIMER_PROF, OPEN_CPU_S + TOKEN_CPU_S * len(answer))
                session = self._sessions[id_] = self._open(grammar)
                session.take(answer)
                return self._mask(session)
            case Advance(id_, tokens):
                advancing = self._sessions.get(id_)
                if advancing is None:
                    return Gone()
                if advancing.seconds_left <= 0:
                    return Mask(b"", error="the grammar takes too much time")
                signal.setitimer(signal.ITIMER_PROF, advancing.seconds_left)
                began = time.process_time()
                advancing.take(array("i", tokens))
                mask = self._mask(advancing)
                advancing.seconds_left -= time.process_time() - began
                return mask
            case Close(id_):
                self._sessions.pop(id_, None)
        return None

    def _checked(self, grammar: str) -> str:
        matcher = self._build(grammar)
        mask = self._cut(matcher.compute_bitmask())
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {clean_message(matcher.get_error())}")
        if matcher.is_stopped() or self._only_ends(mask):
            raise RequestError("The grammar matches the empty text alone.")
        return grammar

    def _open(self, grammar: str) -> _Session:
        template = self._templates.get(grammar)
        if template is None:
            # Compiled and warm: another request with the same grammar takes a copy in microseconds.
            template = self._templates[grammar] = self._build(grammar)
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.popitem(last=False)
        self._templates.move_to_end(grammar)
        return _Session(grammar, template.deep_copy())

    def _mask(self, session: _Session) -> Mask:
        matcher = session.matcher
        mask = self._cut(matcher.compute_bitmask())
        if matcher.is_error() and session.shares_lexer:
            signal.setitimer(signal.ITIMER_PROF, OPEN_CPU_S + TOKEN_CPU_S * len(session.tokens))
            self._templates.pop(session.grammar, None)
            session.matcher = matcher = self._build(session.grammar)
            session.shares_lexer = False
            matcher.consume_tokens(session.tokens)
            mask = self._cut(matcher.compute_bitmask())
        if matcher.is_error():
            return Mask(b"", error=f"the grammar cannot be followed: {clean_message(matcher.get_error())}")
        if matcher.is_stopped() or self._only_ends(mask):
            return Mask(b"", is_finished=True)
        return Mask(mask)

    def _build(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _only_ends(self, mask: bytes) -> bool:
        return mask == self._eos_mask

    def _cut(self, mask: bytes) -> bytes:
        """`mask` without ids that the model does not have."""
        last = 4 * (self._num_words - 1)
        return mask[:last] + (int.from_bytes(mask[last : last + 4], "little") & self._last_word).to_bytes(4, "little")


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """What is read of a tokenizer.json."""

    added_tokens: list[_AddedToken] = []


def _special_tokens(tokenizer: str) -> dict[str, int]:
    added = msgspec.json.decode(tokenizer, type=_TokenizerFile).added_tokens
    return {token.content: token.id for token in added if token.special}


def _mask_of(ids: Sequence[int], num_words: int) -> bytes:
    bits = bytearray(4 * num_words)
    for id_ in ids:
        bits[id_ // 8] |= 1 << id_ % 8
    return bytes(bits)


def _memory_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _serve(sock: socket.socket, server: MatcherServer | str) -> None:
    """Answers until the other end closes; `server` is an error where there is none."""
    decoder = msgspec.msgpack.Decoder(Request)
    resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes() + MATCHER_MEMORY_BYTES,) * 2)
    while (frame := receive_frame(sock)) is not None:
        request = decoder.decode(frame)
        if isinstance(server, str):
            reply: Reply | None = Refused(server, "unsupported_parameter", None)
        else:
            reply = server.answer(request)
            # Not while it writes: half a reply would be taken for the beginning of another.
            signal.setitimer(signal.ITIMER_PROF, 0)
        if reply is not None:
            sock.sendall(pack(reply))


def _fork(sock: socket.socket, others: Sequence[socket.socket], server: MatcherServer | str) -> int:
    if (pid := os.fork()) != 0:
        return pid
    status = 1
    try:
        for other in others:
            other.close()
        _serve(sock, server)
        status = 0
    except OSError:
        status = 0  # the other end is gone
    except BaseException:  # noqa: BLE001 -- said here, since nothing runs after this process
        traceback.print_exc()
    finally:
        os._exit(status)  # nothing of the first process is to be cleaned up here


def main(niceness: int, descriptors: Sequence[int]) -> None:
    """Serves the sockets `descriptors` until all of them are closed at the other end."""
    os.nice(niceness)
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Setup)
    try:
        server: MatcherServer | str = MatcherServer(setup)
    except (ValueError, msgspec.DecodeError) as error:
        server = f"Structured output is not available with this model's tokenizer: {error}"
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page that holds an object
    serving = {_fork(sock, [other for other in sockets if other is not sock], server): sock for sock in sockets}
    while serving:
        pid, status = os.wait()
        sock = serving.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            sock.close()
            continue
        reason = "takes too much time" if code == -signal.SIGPROF else "takes too much memory, or breaks the compiler"
        try:
            sock.sendall(pack(Died(reason)))
        except OSError:
            sock.close()
            continue
        serving[_fork(sock, list(serving.values()), server)] = sock


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
