"""The first words on a connection: both ends prove that they know the key, then compare what protocol they speak.

Until both have, nothing is unpickled. The proof is HMAC of random bytes, by `multiprocessing.connection`; what is said
later on the connection is neither encrypted nor signed.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing import connection as standard
from pathlib import Path

from elastic.cluster.control.connection import SocketConnection, hang_up, in_time
from elastic.cluster.control.messages import PROTOCOL
from elastic.errors import ConfigError, ElasticError, StateError

GREETING = b"elastic protocol "
_MOST = 64
HANDSHAKE_S = 10.0


def prove(connection: SocketConnection, key: bytes, *, first: bool) -> None:
    """Prove to the other end that we know the key, and have it prove the same: `first` (a listener) asks first.

    Raises `ConfigError` for another key, `StateError` for an end that goes away or says something else.
    """
    ours = (standard.deliver_challenge, standard.answer_challenge)
    try:
        for half in ours if first else reversed(ours):
            half(connection.pipe, key)
    except AuthenticationError as error:
        if not str(error).startswith("digest "):  # what is no challenge, since Python 3.12
            raise StateError(f"the other end does not speak this protocol ({str(error)[:100]})") from error
        raise ConfigError("the key is not the same on both sides; give both the same key file") from error
    except (OSError, EOFError) as error:
        why = str(error) or "end of file"
        raise StateError(f"the other end went away before it had proven its key ({why})") from error
    except Exception as error:  # what is no challenge fails an assertion, or raises what the reader of it raises
        raise StateError(f"the other end does not speak this protocol ({type(error).__name__})") from error


def compare_protocols(connection: SocketConnection) -> None:
    """Tell the other end which protocol is spoken here, in plain bytes. Raises `ConfigError` if its own differs."""
    ours = GREETING + str(PROTOCOL).encode()
    try:
        connection.send_bytes(ours)
        theirs = connection.receive_bytes(_MOST)
    except (EOFError, StateError) as error:
        raise StateError(f"the other end went away before it said which protocol it speaks ({error})") from error
    if theirs != ours:
        what = theirs.removeprefix(GREETING).decode("ascii", "replace") if theirs.startswith(GREETING) else "none"
        raise ConfigError(
            f"the other end speaks protocol {what[:16]!r}, this one {PROTOCOL}; install the same version of elastic"
        )


def connect(address: tuple[str, int], key: bytes, *, timeout_s: float = HANDSHAKE_S) -> SocketConnection:
    """Connect to a listener. Raises `ConfigError` for a wrong key, protocol or host name, `StateError` for silence."""
    where = f"{address[0]}:{address[1]}"
    try:
        stream = socket.create_connection(address, timeout_s)
        connection = SocketConnection(stream)
    except (socket.gaierror, UnicodeError) as error:  # the latter of what can be no name, such as "a..b"
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: {why}; give HOST:PORT of the fleet") from error
    except OSError as error:
        raise StateError(f"nobody answers at {where}: {error.strerror or error}") from error
    try:
        with in_time(timeout_s, partial(hang_up, stream)):
            prove(connection, key, first=False)
            compare_protocols(connection)
    except BaseException as error:  # an interrupt too: nobody else has the connection
        connection.close()
        if isinstance(error, ElasticError):
            raise type(error)(f"{where}: {error}") from error
        raise
    return connection


# -- keys


def read_key(path: str | Path) -> bytes:
    """Return the key in a file. Raises `ConfigError` for one that others may read, that is empty or not there."""
    try:
        with open(path, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(4097).strip()
    except OSError as error:
        raise ConfigError(
            f"key file {path}: {error.strerror}; elastic.cluster.control.handshake.make_key_file(path) writes one"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"key file {path} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it")
    require_key(key, f"key file {path}")
    return key


def require_key(key: bytes, where: str) -> None:
    """Raises `ConfigError` for a key that is too short to be a secret, or too long. The key is not told."""
    if not 16 <= len(key) <= 4096:
        raise ConfigError(f"{where} holds {len(key)} bytes; a key has 16 to 4096")


def make_key_file(path: str | Path) -> Path:
    """Write a new key to a file that only its owner can read. Raises `ConfigError` if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be made: {error.strerror}") from error
    with open(descriptor, "wb") as file:
        file.write(secrets.token_hex(32).encode() + b"\n")
    return Path(path)
