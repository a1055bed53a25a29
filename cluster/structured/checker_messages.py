"""What is said to a process that compiles and matches: msgpack frames over one socket, each request one reply.

The process may die of any request but `Close`; its successor answers on the same socket. The reply to what it died of
is `Died`, and sessions it had are `Gone`.
"""

from __future__ import annotations

import msgspec

from cluster.structured.spec import GrammarSpec
from parallel.sockets import pack_frame


class Setup(msgspec.Struct, frozen=True):
    """The model's side of matching; the first frame, on standard input."""

    tokenizer: str
    """A tokenizer.json."""
    vocab_size: int
    """Token ids of the model. Only those that the tokenizer knows too are ever allowed."""
    eos_token_ids: list[int]


class Check(msgspec.Struct, tag="check", frozen=True):
    """Compile a grammar, and compute its first mask. Answered by `Checked` or `Refused`."""

    spec: GrammarSpec
    cpu_s: float
    """CPU time it may take."""


class Open(msgspec.Struct, tag="open", frozen=True):
    """Begin a session, or begin it again. Answered by `Mask`."""

    id: int
    grammar: str
    """A grammar that a `Checked` brought."""
    tokens: bytes
    """int32 token ids of the answer so far."""


class Advance(msgspec.Struct, tag="advance", frozen=True):
    """The answer of a session has grown. Answered by `Mask` or `Gone`."""

    id: int
    tokens: bytes
    """int32 ids of the new tokens."""


class Close(msgspec.Struct, tag="close", frozen=True):
    """A session has ended. Not answered."""

    id: int


class Checked(msgspec.Struct, tag="checked", frozen=True):
    """llguidance's JSON of the grammar."""

    grammar: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The grammar cannot be used."""

    message: str
    code: str
    param: str | None


class Mask(msgspec.Struct, tag="mask", frozen=True):
    """What may follow in a session."""

    mask: bytes
    """uint32 words, bit v for token v; empty when `is_finished` or with an error."""
    is_finished: bool = False
    """Nothing but end of sequence may follow."""
    error: str | None = None
    """The session cannot go on."""


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """There is no such session: it was lost with the process that had it. `Open` begins it again."""


class Died(msgspec.Struct, tag="died", frozen=True):
    """This request took more than it may; the process is gone."""

    reason: str
    """Completes a sentence that begins with the grammar."""


Request = Check | Open | Advance | Close
Reply = Checked | Refused | Mask | Gone | Died


def pack(message: Setup | Request | Reply) -> bytes:
    """One frame: msgpack, with its length in front."""
    return pack_frame(msgspec.msgpack.encode(message))
