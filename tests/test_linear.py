"""FP8 Linear layers behave as nn.Linear within FP8 error, whatever they meet."""

import copy
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampplug


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()).item()


def pair(model: nn.Module, level: str = "O1", lr: float = 0.0, **settings):
    """(plain reference, converted model, its optimizer)."""
    reference = copy.deepcopy(model)
    cls = torch.optim.AdamW if level == "O2" else torch.optim.SGD
    return reference, *ampplug.initialize(model, cls(model.parameters(), lr=lr), level, select="all", **settings)


def net(*sizes: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(i, o, bias=bias) for i, o in zip(sizes, sizes[1:])])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_is_really_there(level, recipe):
    """Errors of 1 to 10 % in outputs and 1 to 15 % in gradients, for gradients of any size: FP8 rounding, and no more."""
    reference, model, optimizer = pair(net(256, 256, 256), level, recipe=recipe)
    for scale in (1.0, 1e-6):
        a = torch.randn(64, 256, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        g = scale * torch.randn(64, 256)
        y, z = model(a), reference(b)
        model.zero_grad(), reference.zero_grad()
        y.backward(g), z.backward(g)
        assert 0.01 < relative(y, z) < 0.10 and 0.01 < relative(a.grad, b.grad) < 0.15
        for p, q in zip(model, reference):
            assert 0.01 < relative(p.weight.grad, q.weight.grad) < 0.15 and relative(p.bias.grad, q.bias.grad) < 0.12


@pytest.mark.parametrize("m,k,n", [(1, 256, 512), (7, 100, 30), (50, 48, 17), (18, 1, 16), (33, 16, 1), (5, 1000, 1), (2, 1, 1)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_any_size(m, k, n, level):
    reference, model, optimizer = pair(net(k, n), level, lr=1e-3)
    for _ in range(3):
        x, g = torch.randn(m, k), torch.randn(m, n)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = model(a), reference(b)
        model.zero_grad(), reference.zero_grad()
        y.backward(g), z.backward(g)
        assert y.shape == (m, n) and relative(y, z) < 0.12 and relative(a.grad, b.grad) < 0.15
        assert relative(model[0].weight.grad, reference[0].weight.grad) < 0.15
        optimizer.step()
        reference.load_state_dict(ampplug.fp32_state_dict(model))


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (2, 3, 4, 32), (0, 32), (4, 0, 32)])
def test_any_rank_and_empty_batches(shape):
    reference, model, optimizer = pair(net(32, 24))
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 24) and x.grad.shape == shape and model[0].weight.grad.shape == (24, 32)
    if x.numel() == 0:
        assert not model[0].weight.grad.any() and not model[0].bias.grad.any()
        optimizer.step()
        assert not model[0]._ampplug.book.scale.any()  # as if nothing had happened
    else:
        assert relative(y, reference(x)) < 0.10


@pytest.mark.parametrize("inside", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_dtype_is_nn_linears(inside, dtype):
    reference, model, _ = pair(net(32, 16), "O2")
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=inside or torch.bfloat16, enabled=inside is not None):
        y = model(x)
    assert y.dtype == (inside or dtype)
    y.sum().backward()
    assert x.grad.dtype == dtype and model[0].weight.grad.dtype == model[0].weight.dtype == torch.bfloat16
    assert model[0].bias.grad.dtype == torch.float32


def test_strided_inputs_and_gradients():
    reference, model, _ = pair(net(64, 32, bias=False))
    x = torch.randn(64, 16).t()
    y, z = model(x), reference(x)
    y.backward(g := torch.randn(32, 16).t()), z.backward(g)
    assert relative(y, z) < 0.10 and relative(model[0].weight.grad, reference[0].weight.grad) < 0.15
    y, z = model(x.expand(3, 16, 64)), reference(x.expand(3, 16, 64))
    y.sum().backward()  # an expanded gradient has stride 0
    assert relative(y, z) < 0.10


def test_accumulation_keeps_every_micro_batch():
    reference, model, _ = pair(net(32, 32, bias=False))
    x, big = torch.randn(16, 32), torch.zeros(16, 32)
    x[:, 0] = 0
    big[:, 0] = 500.0
    for z in [big] + [x] * 64:
        model(z).sum().backward()
        reference(z).sum().backward()
    a, b = model[0].weight.grad, reference[0].weight.grad
    assert relative(a[:, 0], b[:, 0]) < 0.05 and relative(a[:, 1:], b[:, 1:]) < 0.10


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_jumping_ranges(factor):
    """A range that grows is exact at once: a delayed scale never clips. One that shrinks recovers with the window."""
    reference, model, optimizer = pair(net(64, 64, bias=False))
    x = torch.randn(32, 64)
    for _ in range(20):
        model(x).sum().backward()
        optimizer.step()
    y = model(factor * x)
    assert relative(y, reference(factor * x)) < (0.10 if factor > 1 else 1.1)
    for _ in range(17):
        model(factor * x).sum().backward()
        optimizer.step()
    assert relative(model(factor * x), reference(factor * x)) < 0.10


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    runs = []
    for use in (False, True):
        torch.manual_seed(0)
        _, model, optimizer = pair(net(32, 32, 32), "O2", lr=1e-2)
        log = []
        for t in range(4):
            torch.manual_seed(t)
            x = (10.0**t * torch.randn(16, 32)).requires_grad_()
            h = checkpoint(model[0], x, use_reentrant=reentrant) if use else model[0](x)
            loss = model[1](h).square().mean()
            loss.backward()
            log += [loss.detach(), model[0].weight.grad.clone(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
        runs.append(log)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_evaluation_leaves_no_trace():
    runs = []
    for evaluate in (False, True):
        torch.manual_seed(0)
        _, model, optimizer = pair(net(32, 32), "O2", lr=1e-2)
        for t in range(5):
            torch.manual_seed(t)
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(16, 32) * 1e4)
                model.train()
                with torch.no_grad():
                    model(torch.randn(16, 32) * 1e4)
        runs.append((model[0].weight.clone(), model[0]._ampplug.book.scale.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_frozen_parts():
    reference, model, optimizer = pair(net(32, 32))
    model[0].weight.requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None and x.grad is not None and model[0].bias.grad is not None
    model[0].weight.requires_grad_(True)
    model(x.detach()).sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        assert not model(x).requires_grad


def test_module_called_twice_and_tied_weights():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    reference, model, optimizer = pair(Twice(), "O2", lr=1e-2)
    x = torch.randn(16, 32)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert model.a.weight is model.b.weight and relative(model.a.weight.grad, reference.a.weight.grad) < 0.15
    optimizer.step()
    assert len(model.a._ampplug.bank.weights) == 1


def test_saved_for_backward_is_fp8():
    _, model, _ = pair(net(256, 256, bias=False))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.numel(), t.element_size())) or t, lambda t: t):
        model(torch.randn(128, 256, requires_grad=True))
    activations = [size for numel, size in sizes if numel == 128 * 256]
    assert activations == [1], sizes


def test_weight_changed_before_backward_is_an_error():
    _, model, optimizer = pair(net(32, 32), "O2", lr=1e-2)
    y = model(torch.randn(4, 32))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_that_are_not_the_parameter():
    reference, model, _ = pair(net(32, 32))
    x = torch.randn(8, 32)
    other = {k: 3 * v.detach() for k, v in model.state_dict().items()}
    called = torch.func.functional_call(model, other, (x,))
    assert relative(called, torch.func.functional_call(reference, other, (x,))) < 0.10
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", type("Double", (nn.Module,), {"forward": lambda self, w: 2 * w})())
    y = model(x)
    z = nn.functional.linear(x, 2 * reference[0].weight, reference[0].bias)
    assert relative(y, z) < 0.10
    y.sum().backward()
    assert model[0].parametrizations.weight.original.grad is not None


def test_conv1d():
    """Hugging Face's Conv1D keeps its weight [K, N]."""

    class Conv1D(nn.Module):
        def __init__(self, nf, nx):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.zeros(nf))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)

    Conv1D.__module__ = "transformers.pytorch_utils"
    present = sys.modules.get("transformers.pytorch_utils")
    if present is None:
        sys.modules["transformers.pytorch_utils"] = types.ModuleType("transformers.pytorch_utils")
    try:
        for level in ("O1", "O2"):
            reference, model, optimizer = pair(nn.Sequential(Conv1D(24, 40)), level, lr=1e-2)
            for _ in range(3):
                a = torch.randn(2, 8, 40, requires_grad=True)
                b = a.detach().clone().requires_grad_()
                model.zero_grad(), reference.zero_grad()
                y, z = model(a), reference(b)
                y.backward(g := torch.randn(2, 8, 24)), z.backward(g)
                assert 0.01 < relative(y, z) < 0.10 and relative(a.grad, b.grad) < 0.15
                assert relative(model[0].weight.grad, reference[0].weight.grad) < 0.15 and model[0].weight.shape == (40, 24)
                optimizer.step()
                reference.load_state_dict(ampplug.fp32_state_dict(model))
    finally:
        if present is None:
            del sys.modules["transformers.pytorch_utils"]


def test_zero_in_zero_out():
    _, model, optimizer = pair(net(32, 32), "O2", lr=1e-2)
    x = torch.randn(16, 32)
    x[3] = 0
    for inputs in (torch.zeros(16, 32), x):
        y = model(inputs)
        (y * 0).sum().backward()
        optimizer.step()
        assert torch.isfinite(y).all() and all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.allclose(model(torch.zeros(16, 32)), model[0].bias.expand(16, 32), atol=2e-3)


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32), (32,)])
@pytest.mark.parametrize("n,bias", [(32, True), (32, False), (17, True), (17, False)])
def test_output_may_be_changed_in_place(shape, n, bias):
    """ReLU(inplace=True) and the like, whatever the rank and the padding."""
    reference, model, _ = pair(nn.Sequential(nn.Linear(32, n, bias=bias), nn.Threshold(-100.0, 0.0, inplace=True)))
    x = torch.randn(shape)
    y, z = model(x).mul_(2), reference(x).mul_(2)
    y.sum().backward(), z.sum().backward()
    assert y.is_contiguous() and relative(y, z) < 0.10 and relative(model[0].weight.grad, reference[0].weight.grad) < 0.15


def test_called_as_nn_linear_is():
    """By keyword, with forward, backward and pre hooks, in inference mode; integers get an error as in torch."""
    reference, model, _ = pair(net(32, 17), "O2")
    x, log = torch.randn(2, 3, 32, requires_grad=True), []
    assert torch.equal(model[0](input=x), model[0](x))
    model[0].register_full_backward_hook(lambda *a: log.append("backward"))
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    y = model(x)
    y.sum().backward()
    assert log == ["backward"] and relative(y, reference(2 * x)) < 0.10
    with torch.inference_mode():
        assert torch.equal(model(x), y)
    with pytest.raises(RuntimeError, match="dtype"):
        model[0].forward(torch.ones(2, 32, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"'0.weight'.*32.*\[2, 31\]"):
        model(torch.ones(2, 31))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_current_scaling_follows_every_jump(level):
    """No history: each call is exact within FP8 error, whichever way its range jumped, forward and backward."""
    reference, model, optimizer = pair(net(64, 64, bias=False), level, recipe="current")
    assert model[0]._ampplug.book is None
    for factor in (1.0, 1e3, 1e-3, 1e4, 1e-6):
        x = (factor * torch.randn(32, 64)).requires_grad_()
        y, z = model(x), reference(x)
        g = torch.randn(32, 64) / factor
        grads = [torch.autograd.grad(out, (x, m[0].weight), g) for out, m in ((y, model), (z, reference))]
        assert 0.01 < relative(y, z) < 0.10 and all(relative(a, b) < 0.15 for a, b in zip(*grads))
        optimizer.step()


@pytest.mark.parametrize("factor", [1e3, 1e5])
def test_outgrown_gradient_scales_are_recast(factor):
    """The output gradient's delayed scale, too: a jump is neither clipped nor lost."""
    reference, model, optimizer = pair(net(64, 64, bias=False))
    for _ in range(4):
        model(torch.randn(32, 64)).backward(torch.randn(32, 64))
        optimizer.step(), optimizer.zero_grad()
    a = torch.randn(32, 64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    g = factor * torch.randn(32, 64)
    model(a).backward(g), reference(b).backward(g)
    assert 0.01 < relative(a.grad, b.grad) < 0.15 and 0.01 < relative(model[0].weight.grad, reference[0].weight.grad) < 0.15


def test_nan_and_inf_stay_visible():
    _, model, optimizer = pair(net(32, 32), "O2", lr=1e-2)
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step(), optimizer.zero_grad()
    scale = model[0]._ampplug.book.scale.clone()
    for bad in (float("nan"), float("inf")):
        x = torch.randn(8, 32)
        x[3, 5] = bad
        y = model(x)
        assert not torch.isfinite(y[3]).any() and torch.isfinite(y[:3]).all()
        optimizer.zero_grad()
        y[:3].sum().backward()
        model[0].weight.grad = None  # the step itself is not the subject
        optimizer.step()
        assert torch.equal(model[0]._ampplug.book.scale[0], scale[0])  # nothing of it entered the window
    assert torch.isfinite(model(torch.randn(8, 32))).all()


@pytest.mark.parametrize("inside", [torch.bfloat16, torch.float16])
def test_autocast_both_ways(inside):
    """Numbers, not only dtypes: forward in autocast and backward outside, in a chain with plain layers."""
    reference, model, _ = pair(nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 8)), "O1")
    x, t = torch.randn(64, 32), torch.randn(64, 8)
    for m in (model, reference):
        with torch.autocast("cpu", dtype=inside):
            y = m(x)
        assert y.dtype == inside
        (y.float() - t).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert p.grad.dtype == p.dtype and relative(p.grad, q.grad) < 0.20
    assert model(x).dtype == torch.float32 and model[0](x.half()).dtype == torch.float16


def test_fp16_and_bf16_models_at_o1():
    for dtype in (torch.float16, torch.bfloat16):
        reference, model, optimizer = pair(net(64, 32).to(dtype), lr=0.1)
        x = torch.randn(16, 64, dtype=dtype)
        y = model(x)
        y.sum().backward()
        reference(x).sum().backward()
        assert y.dtype == model[0].weight.grad.dtype == dtype and relative(model[0].weight.grad, reference[0].weight.grad) < 0.15
        before = y.detach()
        optimizer.step()
        assert relative(model(x), before) > 0.05


@pytest.mark.parametrize("order", [(1e3, 1.0, 1e-3), (1e-3, 1.0, 1e3), (1.0, 1e3, 1e-3)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sum_of_unequal_micro_batches(level, order):
    """After scales have settled, too: neither the first nor the last micro-batch decides the scale of the sum."""
    reference, model, optimizer = pair(net(32, 32, bias=False), level)
    for _ in range(2):
        optimizer.zero_grad(), reference.zero_grad()
        x = torch.randn(16, 32)
        for k in order:
            model(k * x).sum().backward()
            reference(k * x).sum().backward()
        assert relative(model[0].weight.grad, reference[0].weight.grad) < 0.10
        recorded = model[0]._ampplug.book.amax[0].item()
        assert recorded == pytest.approx(1e3 * x.abs().max().item())
        optimizer.step()


def test_backward_twice_and_double_backward():
    _, model, _ = pair(net(32, 32), "O2")
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x).sum()
    y.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    y.backward()
    assert torch.allclose(model[0].weight.grad, 2 * once)
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        g.sum().backward()


def test_torch_func_transforms():
    """Gradients of FP8-rounded products: grad, vmap and jvp work as for nn.Linear."""
    reference, model, _ = pair(net(32, 16))
    x = torch.randn(8, 32)
    values = {k: v.detach() for k, v in reference.state_dict().items()}
    loss = lambda m: lambda p, x: torch.func.functional_call(m, p, (x,)).square().sum()  # noqa: E731
    a, b = (torch.func.grad(loss(m))(values, x) for m in (model, reference))
    assert all(0.001 < relative(a[k], b[k]) < 0.10 for k in b)
    each, exact = (torch.func.vmap(torch.func.grad(loss(m)), (None, 0))(values, x)["0.weight"] for m in (model, reference))
    assert each.shape == (8, 16, 32) and 0.01 < relative(each, exact) < 0.15
    assert torch.func.jvp(model, (x,), (x,))[1].shape == (8, 16)


def test_older_reparametrizations():
    """weight_norm, spectral_norm and pruning compute the weight anew at each call."""
    import torch.nn.utils.prune as prune

    wraps = [nn.utils.weight_norm, nn.utils.spectral_norm, lambda m: prune.random_unstructured(m, "weight", 0.5)]
    for wrap in wraps:
        for level in ("O1", "O2"):
            torch.manual_seed(0)
            with pytest.warns() if wrap is nn.utils.weight_norm else torch.no_grad():
                layer = wrap(nn.Linear(32, 32))
            model = nn.Sequential(layer)
            model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), level)
            x = torch.randn(16, 32)
            for _ in range(3):
                y = model(x)
                exact = nn.functional.linear(x, model[0].weight.float(), model[0].bias.float())
                assert 0.01 < relative(y, exact) < 0.10
                y.square().sum().backward()
                optimizer.step(), optimizer.zero_grad()
            assert relative(model(x), y) > 0.02  # the parameters behind the weight learn


def test_nested_tensors_stay_in_high_precision():
    reference, model, _ = pair(net(32, 16), "O2")
    parts = [torch.randn(3, 32), torch.randn(5, 32)]
    for layout in (torch.strided, torch.jagged):
        y = model(torch.nested.nested_tensor(parts, layout=layout))
        assert y.is_nested and all(relative(a, reference(b)) < 0.01 for a, b in zip(y.unbind(), parts))


def test_checkpointing_of_several_layers_and_offloaded_activations():
    """A whole block recomputed, and saved tensors moved elsewhere: the same gradients bit for bit."""
    results = []
    for how in ("plain", "checkpoint", "offload"):
        torch.manual_seed(0)
        _, model, optimizer = pair(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32)), "O2", lr=1e-2)
        for t in range(3):
            torch.manual_seed(t)
            x = torch.randn(16, 32) * 10.0**t
            with torch.autograd.graph.save_on_cpu() if how == "offload" else torch.enable_grad():
                y = checkpoint(model, x, use_reentrant=False) if how == "checkpoint" else model(x)
            y.square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        results.append([*model.state_dict().values(), model[0]._ampplug.book.history.clone()])
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r))


def test_evaluation_between_forward_and_backward():
    """What evaluation casts does not disturb a pending backward, and evaluates with the weights of now."""
    _, model, _ = pair(net(32, 32), "O2")
    x = torch.randn(4, 32)
    model(x).sum().backward()
    wanted = model[0].weight.grad.clone()
    model.zero_grad()
    y = model(x)
    model.eval()
    with torch.no_grad():
        model(1e3 * x)
    model.train()
    y.sum().backward()
    assert torch.equal(model[0].weight.grad, wanted)


def test_frozen_weight_saves_no_input():
    """With the weight frozen, the input is not kept for backward; with the input frozen too, nothing is differentiated."""
    _, model, _ = pair(net(256, 256, bias=False), "O1")
    model[0].weight.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = model(torch.randn(128, 256, requires_grad=True))
    assert 128 * 256 not in saved
    y.sum().backward()
    assert not model(torch.randn(4, 256)).requires_grad


def test_users_default_dtype_does_not_matter():
    for dtype in (torch.bfloat16, torch.float64):
        before = torch.get_default_dtype()
        runs = []
        for changed in (before, dtype):
            torch.manual_seed(0)
            weights = net(32, 32).float()
            x = torch.randn(8, 32)
            torch.set_default_dtype(changed)
            try:
                _, model, optimizer = pair(weights, "O2", lr=1e-2)
                for _ in range(3):
                    model(x).square().mean().backward()
                    ampplug.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step(), optimizer.zero_grad()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                runs.append([model(x).detach(), *ampplug.fp32_state_dict(model).values()])
            finally:
                torch.set_default_dtype(before)
        assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_nothing_else_holds_the_input():
    """After forward the high-precision input is free, and what is saved is a byte an element, and the weight that exists anyway."""
    _, model, _ = pair(net(256, 256, bias=False), "O2")
    for shape in ((128, 256), (2, 64, 256)):
        x = torch.randn(shape, requires_grad=True) * 1
        watched, saved = weakref.ref(x), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = model(x)
        assert sum(t.nbytes for t in saved if t.data_ptr() != model[0].weight.data_ptr()) <= 128 * 256 + 64
        del x
        gc.collect()
        assert watched() is None
        y.sum().backward()
