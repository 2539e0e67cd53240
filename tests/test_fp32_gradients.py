"""`grad_dtype="fp32"`: sums of many micro-batches stay exact; and the first micro-batch's gradient is the GEMM's own output, whatever its dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ampplug
from ampplug import entry
from ampplug.nn import compiled, linear_function

pytestmark = [
    pytest.mark.filterwarnings("ignore:ampplug"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs Tensor.grad_dtype"),
]
BF16, FP32 = torch.bfloat16, torch.float32


def make(level: str = "O2", optimizer=torch.optim.AdamW, sizes=(16, 32), dtype=BF16, **settings):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in zip(sizes, sizes[1:], strict=False)]
    model = nn.Sequential(*layers, nn.LayerNorm(sizes[-1])).to(dtype)
    settings = {"grad_dtype": "fp32", **settings}
    return ampplug.initialize(model, optimizer(model.parameters(), lr=1e-2), level, **settings)


@pytest.mark.parametrize("level, backend, n", [("O2", None, 1024), ("O1", None, 260), ("O2", "aot_eager", 260)])  # bf16 stops at 256
def test_1024_ones_are_1024(level, backend, n):
    model, optimizer = make(level, power_of_two=True)
    layer = torch.compile(model[0], backend=backend, fullgraph=True) if backend else model[0]
    x = torch.ones(1, 16, dtype=BF16)
    for _ in range(n):
        layer(x).sum().backward()
        model[1].bias.sum().backward()  # any other parameter
    for p in (model[0].weight, model[0].bias, model[1].bias):
        assert p.grad.dtype == FP32 and (p.grad == n).all() and p.dtype == BF16
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight) and (model[0].weight.grad == n).all()
    optimizer.zero_grad(set_to_none=False)
    layer(x).sum().backward()
    assert model[0].weight.grad.dtype == FP32 and (model[0].weight.grad == 1).all()


def test_compiled_gradients_are_not_rounded_to_bf16():
    """The compiler traces a backward pass whose gradients have the parameters' dtype; the optimizers' hooks see the fp32 ones all the same."""
    grads, seen = [], []

    def look(p):
        if p.grad is not None:  # compiled, it is called without one, too
            seen.append(p.grad.dtype)

    for backend in (None, "aot_eager"):
        model, optimizer = make(sizes=(24, 40, 16))
        model[0].weight.register_post_accumulate_grad_hook(look)
        run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        for seed in range(2):
            torch.manual_seed(seed)
            run(torch.randn(32, 24, dtype=BF16)).float().square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        optimizer.step()
    assert set(seen) == {FP32} and len(seen) >= 4
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype == FP32 and (a - b).norm() < 1e-2 * a.norm()
    weights = [g[i] for g in grads for i in (0, 2)]
    assert all((w != w.bfloat16().float()).any() for w in weights)
    optimizer.zero_grad()  # the compiler traces no parameter whose present gradient has another dtype
    model[0].weight.requires_grad_(False)
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(32, 24, dtype=BF16)).float().sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_any_optimizer_of_torch_takes_them_at_o1(optimizer):
    """It is given the sum, rounded once: the same step as with gradients that were never summed."""
    runs = []
    for grad_dtype in ("fp32", None):
        model, o = make("O1", (lambda p, lr: optimizer([*p], lr=1e-3)), grad_dtype=grad_dtype)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

        def closure(model=model, o=o, x=x):
            o.zero_grad()
            loss = model(x).float().square().sum()
            loss.backward()
            return loss

        if optimizer is torch.optim.LBFGS:
            o.step(closure)
        else:
            closure()
            o.step()
        runs.append(model)
        assert all(p.grad.dtype == (FP32 if grad_dtype else BF16) for p in model.parameters())
    for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_clip_scaler_and_checkpoint():
    """fp32 gradients through clipping, loss scaling, a skipped step and a checkpoint: as bf16 ones, but for the rounding."""
    runs = []
    for grad_dtype in ("fp32", None):
        model, optimizer = make(sizes=(32, 48, 32), dtype=FP32, grad_dtype=grad_dtype)
        scaler = ampplug.GradScaler("cpu", init_scale=256.0)
        for t in range(4):
            for micro in range(2):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * t + micro))
                scaler.scale(model(x).square().mean()).backward()
            if t == 2:
                model[0].weight.grad[0, 0] = float("inf")
            if t % 2:
                scaler.unscale_(optimizer)
                ampplug.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if t == 1:
                saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
                fresh, fresh_optimizer = make(sizes=(32, 48, 32), dtype=FP32, grad_dtype=grad_dtype)
                fresh.load_state_dict(saved[0])
                fresh_optimizer.load_state_dict(saved[1])
                model, optimizer = fresh, fresh_optimizer
        assert scaler.get_scale() == 128.0
        runs.append(ampplug.fp32_state_dict(model))
        assert optimizer.state[model[0].weight]["step"].item() == 3
    start = make(sizes=(32, 48, 32), dtype=FP32)[0].state_dict()
    for name in ("0.weight", "1.weight"):
        moved = [run[name] - start[name].float() for run in runs]
        assert moved[0].norm() > 0 and (moved[0] - moved[1]).norm() < 0.1 * moved[1].norm()


def test_plan_counts_them():
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    plain, wide = (ampplug.plan(model, grad_dtype=g).bytes_per_parameter() for g in (None, "fp32"))
    assert wide["gradient"] == 4 and plain["gradient"] == 2 and wide["total"] - plain["total"] == 2
    assert ampplug.plan(model, opt_level="O1", grad_dtype="fp32").bytes_per_parameter()["gradient"] == 4  # fp32 anyway


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="grad_dtype='fp16' is not legal.*None, 'fp32'"):
        make(grad_dtype="fp16")
    monkeypatch.setattr(entry, "supported", lambda: False)
    model = nn.Linear(16, 16)
    with pytest.raises(ValueError, match="parameter 'weight' is torch.bfloat16 at O2; that needs Tensor.grad_dtype"):
        ampplug.initialize(model, torch.optim.AdamW(model.parameters()), grad_dtype="fp32")
    assert type(model) is nn.Linear and model.weight.dtype == FP32  # nothing was changed
    ampplug.initialize(model, torch.optim.AdamW(model.parameters()), "O1", grad_dtype="fp32")  # its gradients are fp32 anyway


@pytest.mark.parametrize("sizes", [(32, 48), (24, 40)], ids=["whole", "padded"])
@pytest.mark.parametrize("grad_dtype", [None, "fp32"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_first_gradient_is_the_gemms_output(sizes, grad_dtype, backend, monkeypatch):
    """Autograd takes the tensor itself instead of a copy, where it has no padding to cut off."""
    outputs = []

    def remember(*args, **kwargs):
        y = scaled_mm(*args, **kwargs)
        outputs.append((y.data_ptr(), tuple(y.shape)))
        return y

    scaled_mm = linear_function.scaled_mm
    for module in (linear_function, compiled):
        monkeypatch.setattr(module, "scaled_mm", remember)
    model, _ = make(sizes=sizes, grad_dtype=grad_dtype)
    layer = torch.compile(model[0], backend=backend, fullgraph=True) if backend else model[0]
    x = torch.randn(16, sizes[0], dtype=BF16)
    layer(x).sum().backward()
    grad = model[0].weight.grad
    assert grad.is_contiguous() and grad.dtype == (FP32 if grad_dtype else BF16)
    assert (grad.data_ptr() == outputs[-1][0]) == (tuple(grad.shape) == outputs[-1][1]), (outputs, grad.shape)
