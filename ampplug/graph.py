"""`capture`: a whole training step as one CUDA graph. Forward, loss, backward, clip, optimizer and scale update become one launch for the host.

The first calls run the step eagerly, on the batches they are given: they are training, not rehearsal, so that nothing has to be undone. Once lazy
initialisation is over and every FP8 slot has its scale, the step is recorded, and from then on replayed. What a step reads from the host is
brought to the device before each replay: the batch, learning rates and other hyperparameters, weights that were edited or loaded meanwhile.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampplug.kernels.triton_runtime import on_gpu
from ampplug.nn.linear import LinearState
from ampplug.optim.base import LowBitOptimizer
from ampplug.storage import held_weights

EAGER_STEPS = 3  # torch.cuda.graph wants lazy initialisation to be over; DDP wants eleven
EAGER_STEPS_DDP = 11
PATIENCE = 20  # eager steps at most while slots without a scale remain: layers that are never used, steps that are skipped


def capture(step: Callable[..., Any], model: nn.Module, optimizer: Any, *, pool: Any = None) -> CapturedStep:
    """Make `step` run as one CUDA graph: `fast = ampplug.capture(step, model, optimizer)`, then `loss = fast(batch)` instead of `step(batch)`.

    Args:
        step: a function of tensors (or lists, tuples and dicts of them) that does a whole training step and returns tensors: `zero_grad`, forward, loss,
            backward, clipping, `optimizer.step()`. Any number of micro-batches. Schedulers stay outside: call `scheduler.step()` after it.
        model: the module that is trained (or its compiled or DDP wrapper).
        optimizer: the optimizer or the list of them that `step` steps.
        pool: memory that several captured steps share (`torch.cuda.graph_pool_handle()`), as in `torch.cuda.graph`; None for its own.

    Returns:
        A callable with `step`'s arguments and result. Batches may lie on the CPU; their shapes and dtypes must not change. Results are fresh tensors.
        After the first few calls, which run eagerly, Python in `step` no longer runs. Without a GPU every call runs eagerly, with one warning.

    Raises:
        RuntimeError: where `step` does what cannot be captured, with the line that does it; TypeError, ValueError: for wrong arguments.
    """
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}; it must be a function of a batch that does one training step")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers:
        raise ValueError("optimizer is an empty list; it must hold the optimizers that the step steps")
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(o).__name__}; it must be a torch.optim.Optimizer or a list of them")
    if next(model.parameters(), None) is None:
        raise ValueError(f"model ({type(model).__name__}) has no parameters; it must be the module that the step trains")
    return CapturedStep(step, model, optimizers, pool)


class CapturedStep:
    """See `capture`. `graph` is None until the step is captured."""

    def __init__(self, step: Callable[..., Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], pool: Any = None):
        self.step = step
        self.model = model
        self.optimizers = list(optimizers)
        self._pool = pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._eager_calls = 0
        self._inputs: list[Any] | None = None  # the batch that the graph reads: leaves of the arguments
        self._structure: Any = None
        self._result: Any = None
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._where: list[int] = []
        self._stream: torch.cuda.Stream | None = None

    # ---------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One training step."""
        device = next(iter(self.model.parameters())).device
        if not on_gpu(device):
            _warn_eager(device)
            return self.step(*args, **kwargs)
        self._take(args, kwargs, device)
        if self.graph is not None and self._addresses() != self._where:
            self.graph = None  # the model moved; the next lines record it where it is now
        if self.graph is None:
            if not self._ready():
                return self._run_eagerly()
            self._record()
        self._bring_up_to_date()
        assert self.graph is not None
        self.graph.replay()
        return pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self._result)

    def _take(self, args: tuple, kwargs: dict, device: torch.device) -> None:
        """Copy the batch to where the graph reads it."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if self._inputs is None:
            self._structure = structure
            self._inputs = [torch.empty_like(x, device=device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        if structure != self._structure:
            raise ValueError(f"the batch is built as {structure} now; it was {self._structure} in the first call, and the captured step takes no other")
        for i, (mine, given) in enumerate(zip(self._inputs, leaves, strict=True)):
            if isinstance(mine, Tensor):
                if not isinstance(given, Tensor) or given.shape != mine.shape or given.dtype != mine.dtype:
                    found = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
                    raise ValueError(
                        f"tensor {i} of the batch is {found}; the captured step takes {mine.dtype} {list(mine.shape)}, as in the first call "
                        "(drop the last, smaller batch: DataLoader(drop_last=True))"
                    )
            elif isinstance(given, Tensor) or given != mine:
                raise ValueError(f"argument {i} is {given!r}; it was {mine!r} in the first call, and a captured step cannot see it change: make it a tensor")
        with torch.no_grad():
            for mine, given in zip(self._inputs, leaves, strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given, non_blocking=True)

    def _arguments(self) -> tuple[tuple, dict]:
        assert self._inputs is not None
        return pytree.tree_unflatten(self._inputs, self._structure)

    # ---------------------------------------------------------------- before there is a graph

    def _books(self) -> list[Any]:
        books = {id(s.book): s.book for s in self._layers() if s.book is not None}
        return list(books.values())

    def _layers(self) -> list[LinearState]:
        states = (getattr(m, "_ampplug", None) for m in self.model.modules())
        return [s for s in states if isinstance(s, LinearState)]

    def _ready(self) -> bool:
        """Whether recording may begin: enough eager steps, and no slot that still needs its first scale."""
        wanted = EAGER_STEPS_DDP if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in self.model.modules()) else EAGER_STEPS
        if self._eager_calls < wanted:
            return False
        books = self._books()
        torch.cuda.current_stream().synchronize()  # once: news of scales arrives with it
        for book in books:
            book.poll()
        return self._eager_calls >= PATIENCE or all(book.complete for book in books)

    def _run_eagerly(self) -> Any:
        """One step as it is, on a side stream as torch.cuda.graph wants it; from the second on, waiting for the GPU is an error."""
        args, kwargs = self._arguments()
        self._eager_calls += 1
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        stream, current = self._stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(stream):
                if self._eager_calls == EAGER_STEPS:  # by then whatever compiles or tunes itself is done
                    torch.cuda.set_sync_debug_mode("error")
                result = self.step(*args, **kwargs)
        except RuntimeError as error:
            if "synchroniz" in str(error):
                raise self._refusal("waits for the GPU", error) from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(stream)
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.is_cuda:
                t.record_stream(current)
        return result

    def _record(self) -> None:
        for o in self.optimizers:
            if not isinstance(o, LowBitOptimizer):
                for g in o.param_groups:
                    if g.get("capturable") is False:
                        raise RuntimeError(
                            f"ampplug.capture: optimizer {type(o).__name__} has capturable=False; at O1 give it capturable=True (and lr as a "
                            "tensor, if a scheduler changes it), or use O2"
                        )
        self._bring_up_to_date()  # so that nothing is uploaded in the graph, which would upload it again at every replay
        graph = torch.cuda.CUDAGraph()
        args, kwargs = self._arguments()
        cause: Exception | None = None
        try:
            # other threads (a data loader that pins memory) may go on meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    self._result = self.step(*args, **kwargs)
                except Exception as error:  # ending a spoilt recording raises another one, which says less
                    cause = error
                    raise
        except Exception as error:
            for module in self.model.modules():  # what the step marked as done was never run
                for w in held_weights(getattr(module, "_ampplug", None)):
                    w.seen = (0, w.param.dtype, -1)
            cause = cause or error
            raise self._refusal("does what a CUDA graph cannot hold", cause) from cause
        self.graph = graph
        # the graph writes these for as long as it lives
        self._gradients = [(p, p.grad) for o in self.optimizers for g in o.param_groups for p in g["params"]]
        self._where = self._addresses()

    def _refusal(self, what: str, error: BaseException) -> RuntimeError:
        """An error that names the line of the user's code."""
        own = (__file__.rpartition("/")[0], torch.__file__.rpartition("/")[0])
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        at = f" at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
        return RuntimeError(
            f"ampplug.capture: the step {what}{at}. Return tensors and read them outside (`.item()`, prints, conditions on values), and keep Python that must "
            f"run every step outside, too. torch says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )

    # ---------------------------------------------------------------- before each replay

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.model.parameters()]

    def _refresh_stale(self) -> None:
        """FP8 copies of weights that were written to since they were made."""
        banks: dict[int, tuple[Any, list[Any]]] = {}
        for module in self.model.modules():
            state = getattr(module, "_ampplug", None)
            for w in held_weights(state):
                if not w.fresh:
                    banks.setdefault(id(state.bank), (state.bank, []))[1].append(w)  # type: ignore[union-attr]
        for bank, weights in banks.values():
            distinct = list({id(w): w for w in weights}.values())
            bank.refresh(distinct, keep_scale=any(w.master.restored for w in distinct))

    @torch.no_grad()
    def _bring_up_to_date(self) -> None:
        for o in self.optimizers:
            if isinstance(o, LowBitOptimizer):
                o.prepare_replay()
        self._refresh_stale()
        for o in self.optimizers:
            if isinstance(o, LowBitOptimizer):
                for r in o._low_bit.records.values():
                    r.master.restored = False
        for p, grad in self._gradients:
            if p.grad is not grad:  # eager steps came between
                p.grad = grad


_warned: set[str] = set()


def _warn_eager(device: torch.device) -> None:
    if device.type not in _warned:
        _warned.add(device.type)
        warnings.warn(f"ampplug.capture: CUDA graphs need a CUDA device with FP8 units; on {device.type!r} the step runs eagerly", stacklevel=3)
