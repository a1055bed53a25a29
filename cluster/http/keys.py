"""API keys: the file that lists them, and the lookup of the key that a client sends.

The file has only SHA-256 digests, one line per key: `id:sha256[:role[:requests a minute[:requests at once]]]`, then
`:tokens=N` and `:priority=A..B` if the key has them. `new_key` makes keys of 256 random bits, so a digest needs neither
salt nor stretching.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from cluster.http.context import Role
from configs.errors import ConfigError
from configs.schema import ServerConfig

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = "sk-lockstep-"
_LOOK_AGAIN_S = 1.0
_FORM = "id:sha256[:role[:requests a minute[:requests at once]]][:tokens=N][:priority=A..B]"
_RANGE = re.compile(r"(-?\d{1,16})\.\.(-?\d{1,16})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, as a line of the file describes it."""

    id: str
    """Name of the client with this key. A client may have several keys."""
    digest: bytes
    """SHA-256 of the key."""
    role: Role = Role.USER
    rpm: int | None = None
    """Maximum number of requests per minute, for each replica. None for no limit."""
    concurrency: int | None = None
    """Maximum number of sequences that run at once, for each replica. None for no limit."""
    tokens: int | None = None
    """Maximum number of tokens of prompts and answers per minute, for each replica. None for no limit."""
    priorities: tuple[int, int] | None = None
    """Lowest and highest `priority` that counts against requests of other clients. None if none was granted."""


def new_key(id_: str, role: Role = Role.USER) -> tuple[str, str]:
    """A new key, and its line for the file. Raises ConfigError for an id that a line cannot contain."""
    _check_id(id_, "the id")
    key = _PREFIX + secrets.token_urlsafe(32)
    line = f"{id_}:{hashlib.sha256(key.encode()).hexdigest()}"
    return key, line if role == Role.USER else f"{line}:{role}"


def parse_role(name: str, place: str = "") -> Role:
    """The role with this name. Raises ConfigError if there is none; its message begins with `place`."""
    if name not in list(Role):
        raise ConfigError(f"{place}the role is {name[:64]!r}; it must be one of {', '.join(Role)}")
    return Role(name)


def parse_keys(text: str, name: str) -> tuple[ApiKey, ...]:
    """The keys in a file's text. Blank lines and lines that begin with `#` are skipped.

    Raises:
        ConfigError: a line has a wrong form, two keys are the same, or the file has no key. The message contains no
            part of a digest.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key = _parse_line(line, f"{name}:{number}")
        if key.digest in keys:
            raise ConfigError(f"{name}:{number}: an earlier line has the same key as {key.id}; remove one of the two")
        keys[key.digest] = key
    if not keys:
        raise ConfigError(f"{name} lists no keys; add the line that `python -m cluster key ID` prints")
    return tuple(keys.values())


def _parse_line(line: str, place: str) -> ApiKey:
    id_, *rest = line.split(":")
    fields = list(takewhile(lambda field: "=" not in field, rest))
    named = dict(field.partition("=")[::2] for field in rest[len(fields) :])
    is_repeated = len(fields) + len(named) < len(rest)
    if not 1 <= len(fields) <= 4 or is_repeated or named.keys() - {"tokens", "priority"}:
        raise ConfigError(f"{place}: the line is not of the form {_FORM}")
    _check_id(id_, f"{place}: the id")
    digest, role, rpm, concurrency = [*fields, "", "", ""][:4]
    if not _DIGEST.fullmatch(digest.lower()):
        raise ConfigError(f"{place}: the second field is no SHA-256 in hex; make a line by `python -m cluster key ID`")
    return ApiKey(
        id_,
        bytes.fromhex(digest),
        parse_role(role or Role.USER, f"{place}: "),
        rpm=_limit(rpm, place) if rpm else None,
        concurrency=_limit(concurrency, place) if concurrency else None,
        tokens=_limit(named["tokens"], place) if "tokens" in named else None,
        priorities=_range(named["priority"], place) if "priority" in named else None,
    )


def _range(given: str, place: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(given)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"{place}: the range {given[:64]!r} is not of the form -10..10, lowest first")
    return int(found[1]), int(found[2])


def _limit(given: str, place: str) -> int:
    if not (given.isdecimal() and int(given) > 0):
        raise ConfigError(f"{place}: the limit {given!r} is no positive number; leave it out for no limit")
    return int(given)


def _check_id(id_: str, what: str) -> None:
    if not _ID.fullmatch(id_):
        raise ConfigError(f"{what} {id_[:64]!r} must be 1 to 64 letters, digits, dots, underscores or hyphens")


class KeyRing:
    """The keys of a file. The file is read again when it changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file. Raises ConfigError if it cannot be read, or a line is wrong."""
        self._path = path
        self._clock = clock
        # Only this process knows the secret, so that the salts of its caches cannot be derived from the file.
        self._secret = secrets.token_bytes(32)
        self._keys, self._version = self._read()
        self._looked = clock()

    @property
    def has_admin(self) -> bool:
        """Whether some key has the role admin."""
        self._refresh()
        return any(key.role == Role.ADMIN for key in self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that a client sent, or None. Takes the same time for every key, valid or not."""
        self._refresh()
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def salt(self, id_: str) -> bytes:
        """A secret that stands for a client in this process. All keys of a client have the same."""
        return hmac.digest(self._secret, id_.encode(), "sha256")

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_AGAIN_S:
            return
        self._looked = now
        try:
            if _version(self._path) != self._version:
                self._keys, self._version = self._read()
                logger.info("%d API keys, read again", len(self._keys))
        except (ConfigError, OSError) as error:
            # The old keys stay valid, so that a half-written file locks no one out.
            logger.error("the file of API keys has an error, so the old keys stay valid; correct the file: %s", error)

    def _read(self) -> tuple[tuple[ApiKey, ...], tuple[int, ...]]:
        try:
            version = _version(self._path)
            return parse_keys(self._path.read_text("utf-8"), self._path.name), version
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
            raise ConfigError(
                f"server.api_keys={self._path} cannot be read ({reason}); it must be on every node that serves"
            ) from None


def open_keys(server: ServerConfig) -> KeyRing | None:
    """The keys in the file `server.api_keys`. None if the setting names no file. Raises ConfigError if the file cannot
    be read."""
    return KeyRing(Path(server.api_keys).expanduser()) if server.api_keys else None


def _version(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"server.api_keys={path} is no regular file; name a file of keys"
        )  # reading a pipe would block
    return (found.st_ino, found.st_size, found.st_mtime_ns)
