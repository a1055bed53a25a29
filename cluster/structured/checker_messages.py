"""Messages to the process that checks grammars: msgpack frames over one socket. The first is a `Setup`. Then each
`GrammarSpec` is answered by a `Reply`."""

from __future__ import annotations

import msgspec

from cluster.structured.spec import GrammarSpec
from parallel.sockets import pack_frame


class Setup(msgspec.Struct, frozen=True):
    """What a grammar check needs to know about the model."""

    tokenizer: str
    """A tokenizer.json."""
    vocab_size: int
    """Number of token ids of the model. Only ids that the tokenizer has too are ever allowed."""
    eos_token_ids: list[int]


class Checked(msgspec.Struct, tag="checked", frozen=True):
    """llguidance's JSON of the grammar."""

    grammar: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The grammar cannot be used."""

    message: str
    code: str
    param: str


class Died(msgspec.Struct, tag="died", frozen=True):
    """The grammar exceeded a limit."""

    reason: str
    """Completes a sentence that begins with the grammar."""


Reply = Checked | Refused | Died


def pack(message: Setup | GrammarSpec | Reply) -> bytes:
    """One frame: msgpack with a length prefix."""
    return pack_frame(msgspec.msgpack.encode(message))
