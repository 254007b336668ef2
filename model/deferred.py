"""Calls that run in order on one worker thread, and the answers that they owe."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Deferred(Generic[T]):
    """The answer of a call that may still be running."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def result(self, timeout_s: float | None = None) -> T:
        """Waits for the call and answers its value, or raises what it raised.

        Raises:
            TimeoutError: the call is not done within `timeout_s`; it goes on.
        """
        return self._future.result(timeout_s)

    def done(self) -> bool:
        """Whether the call has ended, with a value or an error."""
        return self._future.done()

    def then(self, call: Callable[[], None]) -> "Deferred[None]":
        """The answer of `call`, made after this one without an error, in its thread; at once where that has ended."""
        after: Future[None] = Future()

        def run(ended: "Future[T]") -> None:
            try:
                ended.result()
                call()
            except BaseException as error:
                after.set_exception(error)
            else:
                after.set_result(None)

        self._future.add_done_callback(run)
        return Deferred(after)


def settled(value: T) -> Deferred[T]:
    """The answer of a call that has ended with `value`."""
    future: Future[T] = Future()
    future.set_result(value)
    return Deferred(future)


class Worker:
    """One thread that runs what it is given, in the order given.

    Everything that touches a trainer's state runs here, so that a caller interrupted while it waits never leaves half a step behind.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._executor = ThreadPoolExecutor(1, name, initializer=_use, initargs=(device,))
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Deferred[T]:
        """Queues `call`; it computes with as many threads as the caller has now.

        Raises:
            RuntimeError: the worker was closed.
        """
        if self._closed:
            raise RuntimeError("this trainer was closed: make another one, with resume to go on from its checkpoint")
        threads = torch.get_num_threads()

        def run() -> T:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            return call()

        return Deferred(self._executor.submit(run))

    def close(self) -> None:
        """Waits for what was queued and ends the thread."""
        self._closed = True
        self._executor.shutdown(wait=True)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
