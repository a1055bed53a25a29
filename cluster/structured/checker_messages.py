"""Messages to the process that checks grammars: msgpack frames over one socket. The first message is a `Setup`.
Afterwards, the process answers each `GrammarSpec` with a `Reply`."""

from __future__ import annotations

import msgspec

from cluster.structured.spec import GrammarSpec
from parallel.sockets import pack_frame


class Setup(msgspec.Struct, frozen=True):
    """What a grammar check needs to know about the model."""

    tokenizer: str
    """The text of a tokenizer.json."""
    vocab_size: int
    """Number of token ids of the model. Masks only allow ids that the tokenizer has too."""
    eos_token_ids: list[int]


class Checked(msgspec.Struct, tag="checked", frozen=True):
    """The grammar can be used. It is given as llguidance's JSON."""

    grammar: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The grammar cannot be used, for a reason that the client is told."""

    message: str
    code: str
    param: str


class Died(msgspec.Struct, tag="died", frozen=True):
    """The grammar exceeded a limit and ended the process."""

    reason: str
    """The end of a sentence that begins with "the grammar"."""


Reply = Checked | Refused | Died


def pack(message: Setup | GrammarSpec | Reply) -> bytes:
    """One frame: the message as msgpack, with a length prefix."""
    return pack_frame(msgspec.msgpack.encode(message))
