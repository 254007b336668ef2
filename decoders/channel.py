"""Messages between this process and a decode worker: a JSON head, and a body of bytes that large ones share instead of copying.

Nothing that a worker answers is unpickled or evaluated: a worker that a hostile file has taken over can only answer wrong pixels.
"""

import json
import mmap
import os
import socket
import struct
from typing import Any, cast

_PREFIX = struct.Struct("<IQ?")
"""Bytes of the head, bytes of the body, and whether the body comes as a file descriptor."""
_INLINE_BYTES = 1 << 15
_MAX_HEAD_BYTES = 1 << 20

NOTHING = memoryview(b"")
Head = dict[str, Any]


class NoMemoryFile(Exception):
    """This process can open no more files, or write none of this size, so that a body could not be shared; it says nothing about the
    other end."""


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """A connected pair. Neither end has the number of a standard stream, which is free where this process runs without: what a child
    finds under that number is another file."""
    first, second = socket.socketpair(type=kind)
    return _above_standard(first), _above_standard(second)


def _above_standard(end: socket.socket) -> socket.socket:
    if end.fileno() > 2:
        return end
    import fcntl

    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


class Channel:
    """One end of a connected pair of Unix sockets."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._connection.fileno() < 0

    def close(self) -> None:
        """Closes this end; the other one reads the end of the stream."""
        self._connection.close()

    def send(self, head: Head, body: memoryview = NOTHING) -> None:
        """Sends a message; a body beyond 32 KiB is written once, into memory that both sides map.

        Raises:
            NoMemoryFile: that memory is not to be had; nothing was sent.
            OSError: the other end is closed.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        body = body.cast("B")
        if len(body) <= _INLINE_BYTES:
            self._connection.sendall(b"".join((_PREFIX.pack(len(text), len(body), False), text, body)))
            return
        try:
            shared = os.memfd_create("treadle-decode", os.MFD_CLOEXEC)
        except OSError as error:
            raise NoMemoryFile(str(error)) from error
        try:
            at = 0
            while at < len(body):
                try:
                    at += os.write(shared, body[at : at + (1 << 30)])
                except OSError as error:
                    raise NoMemoryFile(str(error)) from error
            socket.send_fds(self._connection, [_PREFIX.pack(len(text), len(body), True)], [shared])
        finally:
            os.close(shared)
        self._connection.sendall(text)

    def receive(self, timeout_s: float | None = None) -> tuple[Head, memoryview]:
        """The next message.

        Raises:
            TimeoutError: nothing came for so long.
            EOFError: the other end is closed.
            NoMemoryFile: the body's file cannot be opened here.
            OSError: the message is not one of ours.
        """
        self._connection.settimeout(timeout_s)
        prefix, descriptors, _, _ = socket.recv_fds(self._connection, _PREFIX.size, 1)
        try:
            prefix += self._exactly(_PREFIX.size - len(prefix))
            head_bytes, body_bytes, shared = _PREFIX.unpack(prefix)
            if head_bytes > _MAX_HEAD_BYTES or (not shared and (descriptors or body_bytes > _INLINE_BYTES)):
                raise OSError("a malformed message from a decode worker")
            if shared and not descriptors:
                raise NoMemoryFile("the file of a message's body did not arrive: too many open files")
            head = cast(Head, json.loads(self._exactly(head_bytes)))
            if not shared:
                return head, memoryview(self._exactly(body_bytes))
            if os.fstat(descriptors[0]).st_size != body_bytes:
                raise OSError("a message from a decode worker whose body has another size")
            # Mapped in one go: a fault for every page would cost more than the copy that sharing saves.
            return head, memoryview(mmap.mmap(descriptors[0], body_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self._connection.recv(min(count, 1 << 20))
            if not part:
                raise EOFError("the other end is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
