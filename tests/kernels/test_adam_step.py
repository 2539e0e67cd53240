"""Step, norm, scale update, refresh and transpose kernels against their torch references."""

import copy
import math

import pytest
import torch
from torch import nn

import ampplug
from ampplug import formats, storage
from ampplug.kernels import norm, scale_update, tables
from ampplug.kernels.triton_runtime import launches
from ampplug.optim import state as optimizer_state

SHAPES = [(9, 128), (5,), (300,), (3, 4, 10), (), (0,)]
TALL = (132, 16)  # more rows than a chunk has; two thirds of the interpreter's time, so in one test


@pytest.fixture
def triton_path(monkeypatch, device):
    """Make the optimizer launch kernels, in the interpreter where there is no GPU. Returns a switch."""

    def switch(on: bool) -> None:
        if device.type == "cpu":
            for module in (optimizer_state, storage):
                monkeypatch.setattr(module, "on_gpu", lambda _: on)
            monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
            real = torch.tensor
            monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: real(*a, **k))
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    return switch


class Model(nn.Module):
    """Parameters of every kind: converted weights (split, one of them a single row), other fp32 and bf16 ones."""

    def __init__(self, tall: bool):
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(256, 16, bias=True)
        self.b = nn.Linear(70, 17, bias=False)
        self.c = nn.Linear(200, 1)
        self.others = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in [*SHAPES, *[TALL] * tall]])
        self.halves = nn.ParameterList([nn.Parameter(torch.randn(s).bfloat16()) for s in SHAPES])


def run(
    kernels: bool, device, triton_path, steps: int = 2, cls=torch.optim.AdamW, clip: bool = False, unaligned: bool = False, tall: bool = False,
    parts: bool = False, **flags,
):  # fmt: skip
    """A few steps with fixed gradients; returns everything that the step writes."""
    triton_path(kernels)
    model = Model(tall).to(device if kernels else "cpu")
    where = next(model.parameters()).device
    groups = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2], "lr": 3e-3, "weight_decay": 0.3}]
    model, optimizer = ampplug.initialize(model, cls(groups, lr=1e-2, **flags), select="all")
    for i, r in enumerate(optimizer._low_bit.records.values()):
        if parts:  # of larger parameters, one of which begins beyond 2**32
            r.key, r.first = 50 - i, 128 * (i + 2**24 * (i % 3))
    norms = []
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)) * 10.0**-step
            if unaligned:
                g = torch.cat([torch.zeros(1), g.flatten()])[1:].view(p.shape)
            p.grad = None if (i + step) % 5 == 4 else g.to(where, p.dtype)
        if clip:
            norms.append(ampplug.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    records = optimizer._low_bit.records.values()
    return model, optimizer, norms, [
        (r.master.value().cpu(), r.ratio.cpu(), r.v.cpu(), r.top.cpu(), int(r.step), float(r.limit), None if r.weight is None else r.weight.w8.float().cpu())
        for r in records
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        dict(tall=True),
        dict(clip=True, unaligned=True),
        dict(cls=torch.optim.Adam, weight_decay=0.1),
        dict(maximize=True, betas=(0.9, 0.95), eps=0.0),
        dict(parts=True),
        dict(betas=(0.99, 0.95)),
    ],
    ids="-".join,
)
def test_equals_reference(settings, device, triton_path):
    *_, norms, found = run(True, device, triton_path, **settings)
    *_, expected_norms, wanted = run(False, device, triton_path, **settings)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for (p, ratio, v, top, step, limit, w8), (p2, ratio2, v2, top2, step2, limit2, w82) in zip(found, wanted):
        assert torch.allclose(p, p2, rtol=2e-6, atol=1e-6) and (step, limit) == (step2, limit2)
        # approximate reciprocals and roots may tip a rounding
        for a, b in ((ratio, ratio2), (v, v2), (top, top2)):
            assert (a != b).sum() <= max(1, 0.002 * a.numel())
        if w8 is not None:
            assert (w8 != w82).float().mean() < 0.002


def test_launches_do_not_grow(device, triton_path):
    triton_path(True)
    model, optimizer, _, _ = run(True, device, triton_path, steps=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    launches.clear()
    optimizer.step()
    assert launches["adam_step_kernel"] == 1 and launches["transpose_kernel"] == 1


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("how", ["found_inf", "norm"])
def test_a_skipped_step_changes_nothing(kernels, how, device, triton_path):
    model, optimizer, _, before = run(kernels, device, triton_path, steps=2)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    if how == "found_inf":
        optimizer.found_inf = torch.ones(1, device=optimizer._low_bit.device)
    else:
        ampplug.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for r, (p, ratio, v, top, step, limit, w8) in zip(optimizer._low_bit.records.values(), before):
        assert torch.equal(r.master.value().cpu(), p) and torch.equal(r.ratio.cpu(), ratio) and torch.equal(r.v.cpu(), v)
        assert torch.equal(r.top.cpu(), top) and (int(r.step), float(r.limit)) == (step, limit)
        assert w8 is None or torch.equal(r.weight.w8.float().cpu(), w8)


def test_weight_scale_is_a_bound(device, triton_path):
    """One pass: the scale chosen before the step never lets W8 saturate, and W8T follows."""
    for kernels in (True, False):
        model, optimizer, _, _ = run(kernels, device, triton_path)
        for w in optimizer._bank.weights:
            value = w.master.value().cpu()
            assert (value.abs() * w.scale.cpu()).max() <= 448.0
            assert torch.equal(w.w8.view(torch.uint8).t().cpu(), w.w8t.view(torch.uint8).cpu())
            assert torch.equal(w.own_w8.float().cpu(), formats.cast_fp8(value, w.scale.cpu(), formats.E4M3).float())
            assert w.amax.item() == value.abs().max().item()


def test_norm_is_exact_and_repeatable(device):
    grads = [torch.randn(s, device=device) for s in ((300, 200), (77,), (1, 5))]
    rows, shapes = [], []
    for g in grads:
        row = storage.table_row(g, None)
        row[tables.COLUMN["grad"]] = g.data_ptr()
        rows.append(row)
        shapes.append(storage.matrix_shape(g.shape))
    table, chunks = storage.upload(rows, torch.device("cpu")).to(device), tables.chunk_table(shapes, device)
    results = []
    for _ in range(2):
        out, clip, counter = torch.zeros(1, device=device), torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        norm.triton_norm(table, chunks, torch.zeros(norm.MAX_PROGRAMS, device=device), counter, out, clip, 2.0)
        results.append((out.item(), clip.item()))
        assert counter.item() == 0
    exact = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert results[0] == results[1] and results[0][0] == pytest.approx(exact, rel=1e-6)
    assert results[0][1] == pytest.approx(2.0 / (exact + 1e-6), rel=1e-6)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scale_update_equals_reference(power_of_two, device):
    """Twenty steps of a window of sixteen, with slots that record nothing, Inf or NaN, and a skipped step."""
    slots, depth = 150, 16
    shape = dict(amax=torch.zeros(slots), history=torch.zeros(slots, depth), position=torch.zeros(slots, dtype=torch.int32), scale=torch.zeros(slots))
    mine = {k: v.clone().to(device) for k, v in shape.items()}
    top = torch.where(torch.arange(slots) % 2 == 0, 448.0, 57344.0)
    weights = torch.zeros(2, 5)
    for step in range(20):
        amax = torch.exp(torch.randn(slots) * 3)
        amax[step::7] = 0.0
        amax[(step + 1) :: 11] = math.inf
        amax[(step + 2) :: 13] = math.nan
        shape["amax"].copy_(amax)
        mine["amax"].copy_(amax)
        found_inf = torch.tensor([float(step == 7)])
        scale_update.reference_scale_update(**shape, fp8_max=top, margin=1, power_of_two=power_of_two, skip=step == 7)
        scale_update.triton_scale_update(
            **mine, fp8_max=top.to(device), margin=1, power_of_two=power_of_two, weight_amax=weights[0].to(device), next_amax=weights[1].to(device),
            found_inf=found_inf.to(device),
        )  # fmt: skip
        for name, value in shape.items():
            assert torch.equal(mine[name].cpu(), value), (step, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 256), (17, 48), (1, 16), (1, 1000), (16, 1), (3, 130)])
def test_refresh_equals_reference(shape, dtype, device, triton_path):
    p = (torch.randn(shape) * 0.05).to(dtype)
    banks = []
    for kernels in (False, True):
        triton_path(kernels)
        bank = storage.WeightBank([("w", p.clone().to(device if kernels else "cpu"))], torch.device(device if kernels else "cpu"))
        bank.refresh()
        banks.append(bank)
    a, b = (bank.weights[0] for bank in banks)
    for name in ("w8", "w8t", "scale", "scale_inv", "amax"):
        assert torch.equal(getattr(a, name).float(), getattr(b, name).float().cpu()), name


def test_masters_of_a_copy_are_its_own():
    """A state that is restored equals the saved one bit by bit (kept scales included)."""
    model, optimizer = ampplug.initialize(m := nn.Sequential(nn.Linear(64, 64)), torch.optim.AdamW(m.parameters(), lr=1e-2))
    for t in range(3):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    w8 = model[0]._ampplug.weight.w8.clone()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(model[0]._ampplug.weight.w8.view(torch.uint8), w8.view(torch.uint8))
