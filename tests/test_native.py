"""Layers in C++ compute what those in Python compute, bit for bit, and leave to Python what is not theirs."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading

import pytest
import torch
from native_driver import Driver, grid_on_gpu
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampplug
from ampplug.kernels import cast as cast_module
from ampplug.nn import native

pytestmark = pytest.mark.filterwarnings("ignore:ampplug", "ignore:.*Anomaly Detection", "ignore:Error detected in")


@pytest.fixture(scope="session")
def module():
    """The C++ module; skips where it cannot be built."""
    made = native.load()
    if made is None:
        pytest.skip("C++ cannot be built here")
    return made


@pytest.fixture
def driver(module, monkeypatch):
    """Layers on the CPU run in C++, over a stand-in for the CUDA driver."""
    made = Driver()
    monkeypatch.setattr(native, "_devices", {"cpu"})
    monkeypatch.setattr(cast_module, "launch", made.compile)
    monkeypatch.setattr(cast_module, "grid_of", grid_on_gpu)
    module.clear_kernels()
    module.set_driver(ctypes.cast(made.entry, ctypes.c_void_p).value)
    yield made
    module.set_driver(0)
    module.clear_kernels()
    native._kept.clear()
    assert not made.problems, made.problems


class Layers(nn.Module):
    """Three layers over one input, one over another, one without bias, sizes that fill no tile."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(48, 64), nn.Linear(48, 32, bias=False), nn.Linear(48, 32), nn.Linear(64, 48)

    def forward(self, x):
        return self.o(self.q(x) * torch.cat([self.k(x), self.v(x)], -1)) + x


def make(dtype: torch.dtype = torch.float32, level: str = "O2", **settings):
    torch.manual_seed(0)
    model = nn.Sequential(Layers(), Layers()).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if level == "O2" else torch.optim.SGD(model.parameters(), lr=1e-3)
    return ampplug.initialize(model, optimizer, level, select="all", **settings)


def batch(t: int, rows: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, 48, generator=torch.Generator().manual_seed(t)) * 3.0 ** (t % 2)).to(dtype)


def train(model, optimizer, steps: int = 5, dtype: torch.dtype = torch.float32, shape=lambda t: t, forward=None, rows: int = 5) -> list[torch.Tensor]:
    """Outputs, gradients, weights and scales of a few steps."""
    seen = []
    for t in range(steps):
        x = batch(t, rows, dtype).requires_grad_()
        y = (forward or model)(shape(x))
        y.float().square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    book = model[0].q._ampplug.book
    return [*seen, *[p.detach().clone() for p in model.parameters()], book.scale.clone(), book.history.clone()]


def both(driver, how) -> int:
    """Run `how` in Python and in C++; what it returns must be equal. Returns the launches that C++ made."""
    native._devices = set()
    expected = how()
    native._devices = {"cpu"}
    found = how()
    assert all(t.isfinite().all() for t in expected) and len(expected) == len(found) and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return driver.launches


SHAPES = {
    "matrix": lambda x: x,
    "batches": lambda x: x.view(2, 3, 48),
    "transposed": lambda x: x.t().contiguous().t(),
    "strided batches": lambda x: x.view(3, 2, 48).transpose(0, 1),
    "vector": lambda x: x.sum(0),
}


@pytest.mark.parametrize(("dtype", "level", "settings"), [
    (torch.float32, "O2", {}), (torch.float32, "O1", {"recipe": "delayed", "power_of_two": True}), (torch.bfloat16, "O2", {}), (torch.float16, "O1", {})])  # fmt: skip
def test_training_is_the_same(driver, dtype, level, settings):
    # two steps until scales are known; three more: two blocks, a cast for q, k and v, one for o, four backward
    assert both(driver, lambda: train(*make(dtype, level, **settings), dtype=dtype)) + driver.resolved >= 3 * 2 * 6


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(driver, shape):
    assert both(driver, lambda: train(*make(), shape=SHAPES[shape], rows=6)) > 20


def test_autocast(driver):
    def how():
        model, optimizer = make()
        return train(model, optimizer, forward=torch.autocast("cpu", torch.bfloat16)(model))

    assert both(driver, how) > 20


def test_many_tiles(driver):
    """So many that a program casts several, and not all programs may mend: the stand-in compares with the launcher's own grid."""

    def how():
        torch.manual_seed(0)
        layer = nn.Linear(256, 144)
        model, optimizer = ampplug.initialize(layer, torch.optim.AdamW(layer.parameters(), lr=1e-3), select="all")
        x = torch.randn(2100, 256).requires_grad_()
        seen = []
        for _ in range(4):
            model(x.detach()).square().mean().backward()
            seen.append(model.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        model(x).square().mean().backward()
        return [*seen, x.grad]

    assert both(driver, how) > 2
    assert grid_on_gpu(2112, 256, cast_module.TILE_M, cast_module.TILE_K, cast_module.SPAN, torch.device("cpu")) == (33, 2, 34, 4)


def test_a_sum_as_loss(driver):
    """Its gradient is one number, repeated by strides of zero."""

    def how():
        model, optimizer = make()
        train(model, optimizer)
        x = batch(0).requires_grad_()
        model[0].q(x).sum().backward()
        return [x.grad, model[0].q.weight.grad, model[0].q.bias.grad]

    both(driver, how)


@pytest.fixture
def layer(driver):
    """A trained model whose layers run in C++."""
    model, optimizer = make()
    train(model, optimizer)
    return model[0].q, model, optimizer


def used(driver, call) -> bool:
    """Whether a call of one layer launched from C++."""
    before = driver.launches + driver.resolved
    call()
    return driver.launches + driver.resolved > before


def in_cpp(y: torch.Tensor) -> bool:
    """Whether a layer's output comes from C++."""
    return y.grad_fn is not None and not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


def test_what_stays_with_python(driver, layer):
    q, model, optimizer = layer
    x = batch(0)
    assert used(driver, lambda: q(x.clone()))
    assert not used(driver, lambda: q.eval()(x.clone()))
    q.train()
    assert not used(driver, lambda: torch.func.vmap(q)(x.clone()))
    assert not used(driver, lambda: torch.func.functional_call(q, {"weight": q.weight * 2.0}, (x.clone(),)))
    assert not used(driver, lambda: q(x.double()))
    assert not used(driver, lambda: q(x[:0]))
    with pytest.raises(RuntimeError, match="takes inputs"):
        q(x[:, :32])
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    with Mode():
        assert not used(driver, lambda: q(x.clone()))
    with torch.inference_mode():
        assert not used(driver, lambda: q(x.clone()))
    with torch.no_grad():
        assert used(driver, lambda: q(x.clone()))


def test_w8_follows_the_weight(driver, layer):
    q, model, optimizer = layer
    x = batch(0)
    y = q(x.clone())
    with torch.no_grad():
        q.weight.mul_(-2.0)
    assert torch.allclose(q(x.clone()) - q.bias, -2.0 * (y - q.bias), atol=0.3)  # a write that its version tells of
    q.weight.data = torch.zeros_like(q.weight)
    assert torch.equal(q(x.clone()) - q.bias, torch.zeros(5, 64))
    state = optimizer.state_dict()
    with torch.no_grad():
        q.weight.copy_(torch.eye(64, 48))
    optimizer.load_state_dict(state)
    assert not used(driver, lambda: q(x.clone()))  # scales are not known to the host again yet
    q(x.clone())
    assert in_cpp(q(x.clone())) and torch.allclose((q(x.clone()) - q.bias)[:, :48], x, rtol=0.1, atol=1e-2)


def test_scales_that_move(driver, layer):
    """A layer in C++ holds tensors of the book and the bank; where they are replaced it is made anew."""
    q, model, optimizer = layer
    x = batch(0)
    y = q(x.clone())
    book = q._ampplug.book
    for name in ("scale", "amax", "scratch"):
        setattr(book, name, getattr(book, name).clone())
    book._make_views()
    old = q._ampplug.native
    assert not used(driver, lambda: q(x.clone())) and q._ampplug.native is not old
    book.scale[q._ampplug.x_slot] /= 64.0
    changed = q(x.clone())
    assert not torch.equal(changed, y)


def test_siblings(driver, layer):
    """As tests/test_siblings.py: shared by object, version and pass, and never longer than the input lives."""
    q, model, optimizer = layer
    k, bank = model[0].k, q._ampplug.bank
    held = [batch(0)]
    assert used(driver, lambda: q(held[0])) and not used(driver, lambda: k(held[0])) and in_cpp(k(held[0]))
    assert used(driver, lambda: q(held[0].view_as(held[0])))
    q(held[0])
    with torch.no_grad():
        held[0].mul_(2.0)
    assert used(driver, lambda: q(held[0])) and not used(driver, lambda: k(held[0])) and bank.shared.x() is held[0]
    assert used(driver, lambda: k(held[0]))  # again: another pass, for which the memory may have been written anew
    k(held[0]).sum().backward()
    assert bank.shared is None and used(driver, lambda: q(held[0]))
    held.clear()
    gc.collect()
    assert bank.shared is None and bank.native.snapshot() is None


def test_siblings_that_meet_late(driver):
    """Layers that were given different inputs at first are made in C++ with a slot each. expect: given one input they share a cast, as in Python."""

    class Late(Layers):
        apart = 1.0

        def forward(self, x):
            return self.o(self.q(x) * torch.cat([getattr(self, n)(x if self.apart == 1.0 else x * self.apart) for n in "kv"], -1)) + x

    def how() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Late(), Late())
        ampplug.initialize(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), select="all")
        for block in model:
            block.apart = 0.5
        apart = train(model, optimizer, steps=3)
        assert len({s._ampplug.x_slot for s in (model[0].q, model[0].k, model[0].v)}) == 3
        for block in model:
            block.apart = 1.0
        together = train(model, optimizer, steps=4)
        assert len({s._ampplug.x_slot for s in (model[0].q, model[0].k, model[0].v)}) == 1
        return apart + together

    assert both(driver, how) > 0
    assert driver.launches


def test_siblings_across_languages(driver, layer):
    """A cast that Python left serves C++, and the other way round; either backward pass drops either."""
    q, model, optimizer = layer
    k, x = model[0].k, batch(0)

    def python(module):
        return ampplug.nn.linear.fp8_linear(x, module.weight, module.bias, module._ampplug, True)

    python(q)
    assert isinstance(q._ampplug.bank._shared, tuple) and not used(driver, lambda: k(x)) and in_cpp(k(x))
    k(x).sum().backward()
    assert q._ampplug.bank.shared is None
    q(x)
    y = k(x)
    before = driver.launches
    assert in_cpp(y) and torch.equal(python(k), y) and driver.launches == before and q._ampplug.bank.shared is not None
    python(q).sum().backward()
    assert q._ampplug.bank.shared is None


def test_frozen_and_inputs_only(driver):
    def how():
        model, optimizer = make()
        train(model, optimizer)
        q, k = model[0].q, model[0].k
        q.weight.requires_grad_(False)
        x = batch(0).requires_grad_()
        (q(x).sum() + k(x).sum()).backward()
        grads = torch.autograd.grad(k(x).square().sum(), x)
        assert q.weight.grad is None
        return [x.grad, k.weight.grad, q.bias.grad, *grads]

    both(driver, how)


def test_errors_of_autograd(driver, layer):
    q, model, optimizer = layer
    x = batch(0).requires_grad_()
    y = q(x)
    assert y.grad_fn.name() == "_Fp8LinearBackward" and [f[0].name().split("::")[-1] for f in y.grad_fn.next_functions] == ["AccumulateGrad"] * 3
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()
    y = q(x)
    with torch.no_grad():
        q.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    (grad,) = torch.autograd.grad(q(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()
    y = q(x)
    y.add_(1.0)  # not a view: in-place operations may follow
    y.sum().backward()


def test_hooks_and_anomaly_mode(driver, layer):
    q, model, optimizer = layer
    seen = []
    x = batch(0).requires_grad_()
    handles = [q.register_full_backward_hook(lambda m, gi, go: seen.append("module")), q.weight.register_post_accumulate_grad_hook(lambda p: seen.append("weight"))]
    with torch.autograd.detect_anomaly():
        y = q(x)
        y.register_hook(lambda g: seen.append("output"))
        y.sum().backward()
        for handle in handles:
            handle.remove()
        with pytest.raises(RuntimeError, match="Function '_Fp8LinearBackward' returned nan values"):
            q(x).backward(torch.full((5, 64), float("nan")))
    assert sorted(seen) == ["module", "output", "weight"]


def test_saved_tensors(driver, layer):
    """What is kept for backward is what Python keeps, so that hooks on it and either kind of recomputation work."""
    q, model, optimizer = layer
    kept = []
    x = batch(0).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((tuple(t.shape), t.dtype)) or t.clone(), lambda t: t):
        y = q(x)
    assert kept == [((48, 16), torch.float8_e4m3fn), ((1,), torch.float32), ((64, 48), q.weight.dtype)]
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(driver, reentrant):
    def how():
        model, optimizer = make()

        def forward(x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        return train(model, optimizer, forward=forward)

    assert both(driver, how) > 20


def test_copies(driver, layer):
    q, model, optimizer = layer
    x = batch(0)
    y = q(x.clone())
    other = copy.deepcopy(q)
    assert other._ampplug.native is None and torch.equal(other(x.clone()), y)
    assert in_cpp(other(x.clone())) and torch.equal(other(x.clone()), y)
    with torch.no_grad():
        other.weight.zero_()
    other(x.clone())
    assert torch.equal(q(x.clone()), y)


def test_a_layer_called_twice_and_two_threads(driver, layer):
    q, model, optimizer = layer
    x, z = batch(0).requires_grad_(), batch(1).requires_grad_()
    (q(x) + q(z)).sum().backward()
    expected = [x.grad, z.grad]
    results: list = [None] * 8

    def work(i: int) -> None:
        leaf = (x if i % 2 == 0 else z).detach().clone().requires_grad_()
        for _ in range(5):
            leaf.grad = None
            q(leaf).sum().backward()
        results[i] = leaf.grad

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(r, expected[i % 2]) for i, r in enumerate(results))


def test_launches_are_counted(driver, layer):
    from ampplug.kernels.triton_runtime import Counter, launches

    q, model, optimizer = layer
    x = batch(0)
    for t in range(2):  # the first of a kind is Python's
        launches.clear()
        before = driver.launches
        q(x.clone()).sum().backward()
    made = driver.launches - before
    assert made == 2 and Counter(launches)["cast_kernel"] == launches["cast_kernel"] == sum(launches.values()) == 2


def test_a_failed_launch(driver, layer, module):
    q, model, optimizer = layer
    driver.kernels = [([], {}) for _ in driver.kernels]
    with pytest.raises(RuntimeError, match="launch of cast_kernel failed"):
        q(batch(0))
    driver.problems.clear()


def test_an_error_of_the_first_launch(driver, layer, module, monkeypatch):
    """Python's error, forward and backward."""
    q, model, optimizer = layer

    def broken(*args, **constants):
        raise LookupError("no such kernel")

    y = q(batch(0))
    module.clear_kernels()
    monkeypatch.setattr(cast_module, "launch", broken)
    with pytest.raises(LookupError, match="no such kernel"):
        y.sum().backward()
    with pytest.raises(LookupError, match="no such kernel"):
        q(batch(0))


def test_a_foreign_kernel_stays_with_triton(driver, layer, module, caplog, monkeypatch):
    """One whose parameters are not those that C++ passes is launched by Python every time."""
    q, model, optimizer = layer
    y = q(batch(0))
    module.clear_kernels()
    monkeypatch.setattr(native, "parameter_sizes", lambda ptx: [8, 8])
    before = driver.resolved, driver.launches
    assert torch.equal(q(batch(0)), y) and torch.equal(q(batch(0)), y)
    assert (driver.resolved - before[0], driver.launches - before[1]) == (2, 0)
    assert "stays with Triton's launcher: its parameters have [8, 8] bytes" in caplog.text


def test_no_compiler(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_failed", False)
    monkeypatch.setattr(native, "_devices", {"cpu"})
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    model, optimizer = make()
    train(model, optimizer, 3)
    assert model[0].q._ampplug.native is None and caplog.text.count("layers run in Python") == 1
    assert not [p for p in (tmp_path / "ampplug").iterdir() if p.suffix in (".tmp", ".so")]
