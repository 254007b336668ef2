"""Bytes of one item to a payload array: decoded right, or refused with its kind."""

from treadle.decoders.decode import decode, probe
from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import DecodeOptions
from treadle.decoders.payload import Payload, Probe

__all__ = ["DecodeError", "DecodeOptions", "Payload", "Probe", "decode", "probe"]
