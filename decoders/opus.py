"""Opus in containers without checksums: each packet says how long it lasts (RFC 6716, 3.1), and the next one's time says it again."""

from typing import Any

from treadle.decoders.errors import DecodeError

_MS = (
    *((10.0, 20.0, 40.0, 60.0) * 3),  # SILK alone
    *((10.0, 20.0) * 2),  # both
    *((2.5, 5.0, 10.0, 20.0) * 4),  # CELT alone
)
"""Milliseconds of a frame, by the upper five bits of a packet's first byte."""
_ROUNDING_MS = 1.1
"""Of times in whole milliseconds."""


class SteadyPackets:
    """Watches the packets of one stream."""

    def __init__(self, time_base: Any) -> None:
        self._tick_ms = float(time_base * 1000)
        self._pts: int | None = None
        self._last_ms = self._usual_ms = 0.0

    def add(self, packet: Any) -> None:
        """Takes the next packet.

        Raises:
            DecodeError: the one before lasts as long as none does here, and not up to this one.
        """
        if packet.size == 0 or packet.pts is None:
            return
        last_ms = _packet_ms(memoryview(packet))
        if self._pts is not None and self._usual_ms:
            step_ms = (packet.pts - self._pts) * self._tick_ms
            odd = abs(self._last_ms - self._usual_ms) > _ROUNDING_MS
            # Where sound is left out, or the encoder takes other frames, times go by what the packets say, or by more.
            if odd and abs(step_ms - self._usual_ms) < _ROUNDING_MS + self._tick_ms:
                raise DecodeError("corrupt", f"an Opus packet of {self._last_ms:g} ms where the next begins after {step_ms:.1f} ms")
            if not odd or abs(step_ms - self._last_ms) < _ROUNDING_MS + self._tick_ms:
                self._usual_ms = self._last_ms
        elif self._pts is not None:
            # Of the first two packets neither is usual yet.
            step_ms = (packet.pts - self._pts) * self._tick_ms
            self._usual_ms = last_ms if abs(step_ms - last_ms) < _ROUNDING_MS + self._tick_ms else 0.0
            if self._usual_ms and abs(self._last_ms - last_ms) > _ROUNDING_MS:
                raise DecodeError("corrupt", f"an Opus packet of {self._last_ms:g} ms where the next begins after {step_ms:.1f} ms")
        self._pts, self._last_ms = packet.pts, last_ms


def _packet_ms(data: memoryview) -> float:
    code = data[0] & 3
    count = (data[1] & 63 if len(data) > 1 else 0) if code == 3 else 1 + (code > 0)
    return _MS[data[0] >> 3] * count
