"""The entry: one item's bytes to its payload, told by what they hold, never by a name."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Literal

from treadle.decoders.audio import decode_audio, probe_audio
from treadle.decoders.errors import DecodeError
from treadle.decoders.image import decode_picture, probe_image, read_picture
from treadle.decoders.isolate import AVAILABLE, HEAVY_PIXELS, NoWorker, codec_may_crash, decode_isolated, probe_isolated
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.payload import Payload, Probe
from treadle.decoders.sniff import sniff
from treadle.decoders.text import decode_text, probe_text
from treadle.decoders.video import decode_video, probe_video
from treadle.shape import BatchShape, Modality, require_choice, require_member, shown

Buffer = bytes | bytearray | memoryview
Cut = Literal["tail", "head"]

_DEFAULT_OPTIONS = DecodeOptions()


def decode(
    modality: Modality,
    data: Buffer,
    shape: BatchShape,
    options: DecodeOptions = _DEFAULT_OPTIONS,
    cut: Cut = "tail",
) -> Payload:
    """Decodes one item for a row of `shape`; safe to call from many threads.

    `cut="head"` keeps the end of a text that is longer than the row, for items that offer choices; their row also
    gives up one position to the mask.

    Raises:
        DecodeError: the bytes are refused; the only error that content can raise.
        ValueError: `shape` has no slice for `modality`, or an argument is of another type or none of its values.
    """
    modality = Modality.given("decode", "modality", modality)
    view, capacity, deadline = _prepare(modality, data, shape, options, cut)
    with _only_decode_errors():
        if modality is Modality.TEXT:
            return decode_text(view, capacity, cut, deadline)
        picture = read_picture(view, options) if modality is Modality.IMAGE else None
        if _wants_worker(modality, view, options, 0 if picture is None else picture.work_px):
            with _or_here():
                return decode_isolated(modality, view, shape, options, cut)
        if picture is not None:
            return decode_picture(view, picture, shape.image.resolved(), capacity, options, deadline)
        if modality is Modality.VIDEO:
            return decode_video(view, shape.video.resolved(), capacity, options, deadline)
        return decode_audio(view, shape.audio.resolved(), capacity, options, deadline)


def probe(
    modality: Modality,
    data: Buffer,
    shape: BatchShape,
    options: DecodeOptions = _DEFAULT_OPTIONS,
    cut: Cut = "tail",
) -> Probe:
    """What `decode` would answer, from headers alone: exact for text and images, an estimate for video and audio.

    Raises:
        DecodeError: the header is refused.
        ValueError: as `decode`.
    """
    modality = Modality.given("decode", "modality", modality)
    view, capacity, deadline = _prepare(modality, data, shape, options, cut)
    with _only_decode_errors():
        if modality is Modality.TEXT:
            return probe_text(view, capacity, cut, deadline)
        if _wants_worker(modality, view, options):
            with _or_here():
                return probe_isolated(modality, view, shape, options, cut)
        if modality is Modality.IMAGE:
            return probe_image(view, shape.image.resolved(), capacity, options)
        if modality is Modality.VIDEO:
            return probe_video(view, shape.video.resolved(), capacity, options, deadline)
        return probe_audio(view, shape.audio.resolved(), capacity, options, deadline)


def _prepare(modality: Modality, data: Buffer, shape: BatchShape, options: DecodeOptions, cut: Cut) -> tuple[memoryview, int, Deadline]:
    require_member("decode", "shape", shape, BatchShape)
    require_member("decode", "options", options, DecodeOptions)
    require_choice("decode", "cut", cut, ("tail", "head"))
    try:
        view = memoryview(data)
    except TypeError:
        raise ValueError(f"decode.data is {shown(data)}: it must be the bytes of one item") from None
    if not shape.is_live(modality):
        raise ValueError(f"modality is {modality}: the shape has no live {modality} slice (BatchShape.{modality})")
    if view.nbytes == 0:
        raise DecodeError("empty", f"the {modality} has no bytes")
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if len(view) > options.max_input_bytes:
        raise DecodeError("too_large", f"{len(view)} bytes are above max_input_bytes {options.max_input_bytes}")
    return view, shape.token_capacity(choices=cut == "head"), Deadline(options.max_wall_s)


def _wants_worker(modality: Modality, view: memoryview, options: DecodeOptions, work_px: int = 0) -> bool:
    if not (options.isolate and AVAILABLE):
        return False
    return work_px >= HEAVY_PIXELS or codec_may_crash(modality, sniff(view), view, options)


@contextmanager
def _or_here() -> Generator[None]:
    """Goes on in this process where no worker can be started."""
    with suppress(NoWorker):
        yield


@contextmanager
def _only_decode_errors() -> Generator[None]:
    """Lets content raise nothing but `DecodeError`, whatever a codec library throws."""
    try:
        yield
    except (DecodeError, ImportError):
        # A library that is missing here says nothing about the item.
        raise
    except MemoryError as error:
        raise DecodeError("too_large", f"out of memory: {error}") from error
    except Exception as error:
        raise DecodeError("corrupt", f"{type(error).__name__}: {error}") from error
