"""What a run shows while it goes on, what Ctrl-C does to it, and how many threads it takes."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampplug.demo.model import SHAPES
from ampplug.demo.settings import Settings


class Progress:
    """A tqdm bar where tqdm is installed and the output is a terminal, else a line now and then."""

    def __init__(self, title: str, done: int, total: int):
        self.title, self.total, self._printed = title, total, -math.inf
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            size = shutil.get_terminal_size()  # tqdm shows nothing on terminals that do not know their size
            self._bar = tqdm(total=total, initial=done, desc=title, unit="step", ncols=size.columns, nrows=size.lines)

    def update(self, step: int, loss: float, rate: float) -> None:
        """After `step` steps: the last loss, and tokens a second."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {_count(rate)} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif step - self._printed >= self.total / 20 or step == self.total:
            self._printed = step
            print(f"{self.title}: step {step}/{self.total}, loss {loss:.3f}, {_count(rate)} tokens/s", flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _count(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function true, so that no step is cut in half; the second interrupts as usual."""
    asked = False

    def handle(*_: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():  # no signals there
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def threads(settings: Settings) -> Iterator[None]:
    """One thread for the small preset on a CPU, unless OMP_NUM_THREADS is set.

    Emulated FP8 is thousands of short parallel regions a step, and at the end of each the threads spin until the last arrives. Beside two busy
    processes on two cores a step took 16 s with two threads and 0.64 s with one; alone 0.28 s and 0.34 s.
    """
    before = torch.get_num_threads()
    if settings.device == "cpu" and settings.shape == SHAPES["small"] and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
