"""Ctrl-C and SIGTERM as a request: the step that runs is finished, everything is saved, and the process exits as asked."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Whether somebody has asked this process to stop; a second Ctrl-C interrupts at once. A context manager that listens meanwhile."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[int, object] = {}
        self.name = ""
        """Who asked: the signal's name, as a rule."""
        self.urgent = False
        """Whether it was a signal: who sends one waits for the process to end."""

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def ask(self, why: str) -> None:
        """Asks to stop, as a signal would."""
        if not self._asked.is_set():
            self.name = why
            self._asked.set()

    def __enter__(self) -> Self:
        # Handlers belong to the main thread; elsewhere (a notebook's worker) nothing is listened to.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal answered
        self._before.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)
        self.urgent = True
