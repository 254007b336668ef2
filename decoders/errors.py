"""The one error that bad input raises."""

from typing import Literal

DecodeErrorKind = Literal["empty", "unsupported", "corrupt", "truncated", "too_large", "no_stream", "timeout"]
"""Why an item was refused: nothing in it, a format that is not read, damage, an end that is missing, a size beyond
`DecodeOptions`, no stream of the modality, or too long a decode."""


class DecodeError(Exception):
    """An item's bytes were refused; `kind` is stable, `detail` is for people."""

    def __init__(self, kind: DecodeErrorKind, detail: str) -> None:
        # Both arguments reach `args`, so the error crosses process borders whole.
        super().__init__(kind, detail)
        self.kind: DecodeErrorKind = kind
        self.detail = detail
        self.index: int | None = None
        """Which of a caller's items it is about, set by callers that decode many."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
