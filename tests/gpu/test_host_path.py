"""Layers in C++ on a GPU: what those in Python compute, bit for bit, with the same launches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampplug
from ampplug.kernels.triton_runtime import launches
from ampplug.nn import native

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    """Without C++ nothing below would be tested."""
    monkeypatch.setattr(native, "_devices", {"cuda"})
    assert native.load() is not None


class Block(nn.Module):
    """Three layers over one input, one over another; biases and none; a size that needs padding in one."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.o, self.odd = nn.Linear(width, width, bias=False), nn.Linear(width, 200)

    def forward(self, x):
        h = self.norm(x)
        h = self.o(torch.sigmoid(self.q(h)) * self.k(h) + self.v(h))
        return x + h + self.odd(h).mean(-1, keepdim=True)


def make(level: str = "O2", dtype: torch.dtype = torch.bfloat16, capturable: bool = False, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(Block(256), Block(256)).to(DEVICE, dtype)
    options = dict(capturable=True, lr=torch.tensor(1e-3, device=DEVICE)) if capturable and level == "O1" else dict(lr=1e-3)
    # in fp16 the squares of AdamW vanish
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if dtype == torch.float16 else torch.optim.AdamW(model.parameters(), **options)
    return ampplug.initialize(model, optimizer, level, select="all", **settings)


def batch(t: int, dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, 48)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(t)
    return (torch.randn(*rows, 256, generator=generator) * 3.0 ** (t % 3)).to(DEVICE, dtype)


def train(model, optimizer, steps: int = 8, dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, 48), forward=None) -> list[torch.Tensor]:
    """Outputs, gradients, and at the end weights and scales. Waits for the GPU after each step, so that the host knows scales equally early."""
    seen = []
    for t in range(steps):
        x = batch(t, dtype, rows).requires_grad_()
        y = (forward or model)(x)
        y.float().square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    book = model[0].q._ampplug.book
    return [*seen, *[p.detach().clone() for p in model.parameters()], book.scale.clone(), book.history.clone()]


def same(how) -> None:
    """`how` in Python and in C++: equal tensors, equal counts of launches."""
    results = []
    for python in (True, False):
        launches.clear()
        if python:
            with native.left_out():
                results.append((how(), dict(launches)))
        else:
            results.append((how(), dict(launches)))
    (expected, counts), (found, own) = results
    assert counts == own
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.isfinite().all(), i
        assert torch.equal(a, b), (i, (a.float() - b.float()).abs().max())


def in_cpp(y: torch.Tensor) -> bool:
    return y.grad_fn is not None and not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


@pytest.mark.parametrize("rows", [(2, 48), (33,), (1,), (2, 3, 16)])
@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.bfloat16), ("O1", torch.bfloat16), ("O2", torch.float32), ("O1", torch.float16)])
def test_training_is_the_same(level, dtype, rows):
    same(lambda: train(*make(level, dtype), dtype=dtype, rows=rows))


def test_it_is_used():
    """Else all other tests compare Python with itself."""
    model, optimizer = make()
    train(model, optimizer, 5)
    h = model[0].norm(batch(0))
    layers = model[0]
    assert all(in_cpp(f(h)) for f in (layers.q, layers.k, layers.v, layers.o)) and not in_cpp(layers.odd(h))
    layers.q(h).sum().backward()
    before = native.load().take_launches()
    layers.q(h).sum().backward()
    assert native.load().take_launches() == 2, before


def test_autocast_and_power_of_two():
    def how():
        model, optimizer = make("O1", torch.float32, power_of_two=True)
        return train(model, optimizer, dtype=torch.float32, forward=torch.autocast("cuda", torch.bfloat16)(model))

    same(how)


def test_evaluation_between():
    def how():
        model, optimizer = make()
        seen = []
        for t in range(4):
            seen += train(model, optimizer, 3)
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(t)))
            model.train()
            for p in model.parameters():
                p.data.mul_(1.01)  # leaves no trace
            ampplug.refresh(model)
        return seen

    same(how)


def test_a_written_weight_is_cast_anew():
    model, optimizer = make()
    train(model, optimizer, 5)
    q = model[0].q
    h = batch(0)
    with torch.no_grad():
        q.weight.zero_()
        q.bias.zero_()
    assert not q(h).any()
    assert in_cpp(q(h)) and not q(h).any()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_captured(level):
    def how():
        model, optimizer = make(level, capturable=True)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        fast = ampplug.capture(step, model, optimizer)
        losses = []
        for t in range(10):
            losses.append(fast(batch(t)).clone())
            torch.cuda.synchronize()
        assert fast.graph is not None
        return [*losses, *[p.detach().clone() for p in model.parameters()]]

    results = []
    with native.left_out():
        results.append(how())
    results.append(how())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_streams():
    """A cast of another stream is not shared, and launches go where torch's current stream is."""
    model, optimizer = make()
    train(model, optimizer, 5)
    q, h = model[0].q, batch(0)
    expected = q(h).clone()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = native.load().take_launches()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        g = h * 1.0
        y = q(g)
        z = q(h)  # cast already, but on the other stream
    q(h)
    torch.cuda.synchronize()
    assert torch.equal(y, expected) and torch.equal(z, expected), before


def test_fresh_threads():
    """A thread whose first use of CUDA is a launch from C++: forward, and backward with nothing before it."""
    import threading

    model, optimizer = make()
    train(model, optimizer, 5)
    q, h, dy = model[0].q, batch(0), torch.ones(2, 48, 256, device=DEVICE, dtype=torch.bfloat16)
    q(h).backward(dy)
    expected = q(h).detach().clone(), q.weight.grad.clone()
    found: list = []

    def work() -> None:
        try:
            leaf = h.detach()
            y = q(leaf)
            found.append((y.detach(), *torch.autograd.grad(y, q.weight, dy)))
        except BaseException as error:
            found.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 3 and all(isinstance(f, tuple) and torch.equal(f[0], expected[0]) and torch.equal(f[1], expected[1]) for f in found), found


def test_recomputation_and_accumulation():
    from torch.utils.checkpoint import checkpoint

    def how():
        model, optimizer = make()

        def forward(x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        seen = train(model, optimizer, 4, forward=forward)
        for t in range(3):
            model(batch(t)).float().square().mean().backward()
        return [*seen, *[p.grad.clone() for p in model.parameters()]]

    same(how)


def test_it_costs_less():
    """Many layers, no synchronisation between: C++ issues a pass in well under Python's time."""
    import time

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(32)]).to(DEVICE, torch.bfloat16)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-5), select="all")
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    dy = torch.randn_like(x)

    def seconds() -> float:
        best = float("inf")
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(x).backward(dy)
            best = min(best, time.perf_counter() - began)
            model.zero_grad()
        return best

    for _ in range(4):
        model(x).backward(dy)
        optimizer.step()
        model.zero_grad()
        torch.cuda.synchronize()
    native_seconds = seconds()
    with native.left_out():
        assert native_seconds < 0.8 * seconds()
