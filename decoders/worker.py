"""The process in which a crash costs one item: reads items from its channel, decodes them, answers payloads or refusals.

It ends when the channel does. An alarm ends it where a codec stalls and nobody is left to kill it.
"""

import functools
import json
import signal
import socket
from typing import Any

import numpy as np

from treadle.decoders.channel import NOTHING, Channel, Head, NoMemoryFile
from treadle.decoders.decode import decode, probe
from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import DecodeOptions
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

_GRACE_S = 10
_LONGEST_ALARM_S = 2**31 - 1


@functools.lru_cache(maxsize=16)
def read_settings(text: str) -> tuple[BatchShape, DecodeOptions]:
    """Shape and options, their fields given as JSON has them."""
    plain = json.loads(text)
    fields: dict[str, Any] = plain["shape"]
    image, video, audio = ImageShape(**fields.pop("image")), VideoShape(**fields.pop("video")), AudioShape(**fields.pop("audio"))
    return BatchShape(image=image, video=video, audio=audio, **fields), DecodeOptions(**plain["options"])


def stand_apart() -> None:
    """Leaves to the parent, which ends this process when it wants, what a terminal or a scheduler tells a whole group of processes, and
    has what the parent may have blocked or ignored: its own alarm, and word of its children's ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def serve(descriptor: int) -> None:
    """Answers messages until the other end is closed."""
    stand_apart()
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send({"ready": True})
    while True:
        try:
            head, body = channel.receive()
        except (EOFError, OSError):
            return
        answer, array = _answer(head, body)
        try:
            try:
                channel.send(answer, NOTHING if array is None else array.data)
            except NoMemoryFile as error:
                channel.send({"no_memory_file": str(error)})
        except OSError:
            return


def _answer(head: Head, body: memoryview) -> tuple[Head, "np.ndarray[Any, Any] | None"]:
    shape, options = read_settings(head["settings"])
    modality = Modality(head["modality"])
    signal.alarm(int(min(options.max_wall_s + _GRACE_S, _LONGEST_ALARM_S)))
    try:
        if head["probe"]:
            seen = probe(modality, body, shape, options, head["cut"])
            return {"grid": seen.grid, "extent": seen.extent, "exact": seen.exact}, None
        payload = decode(modality, body, shape, options, head["cut"])
        array = payload.array
        answer = {"grid": payload.grid, "extent": payload.extent, "truncated": payload.truncated}
        return {**answer, "dtype": array.dtype.str, "shape": array.shape}, array.reshape(-1).view(np.uint8)
    except DecodeError as error:
        return {"kind": error.kind, "detail": error.detail}, None
    except ImportError as error:
        return {"missing": str(error)}, None
    finally:
        signal.alarm(0)
