"""Messages to the process that checks grammars: msgpack frames over one socket. The first is a `Setup`; then each
`GrammarSpec` is answered by a `Reply`."""

from __future__ import annotations

import msgspec

from cluster.structured.spec import GrammarSpec
from parallel.sockets import pack_frame


class Setup(msgspec.Struct, frozen=True):
    """The model's side of matching."""

    tokenizer: str
    """A tokenizer.json."""
    vocab_size: int
    """Token ids of the model. Only those that the tokenizer knows too are ever allowed."""
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
    """The grammar took more than it may."""

    reason: str
    """Completes a sentence that begins with the grammar."""


Reply = Checked | Refused | Died


def pack(message: Setup | GrammarSpec | Reply) -> bytes:
    """One frame: msgpack, with its length in front."""
    return pack_frame(msgspec.msgpack.encode(message))
