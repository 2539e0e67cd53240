"""Whole-step CUDA graphs: replays equal eager steps, bit for bit, through everything that changes between them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ampplug

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Model(nn.Module):
    """Linears that need padding, a norm, dropout."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.up, self.down = nn.Linear(96, 200), nn.Linear(200, 96, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(96, 24)

    def forward(self, x):
        return self.head(x + self.dropout(self.down(torch.relu(self.up(self.norm(x))))))


def make(level: str = "O2", dropout: float = 0.0, **settings):
    torch.manual_seed(0)
    model = Model(dropout).to(DEVICE)
    options = {} if level == "O2" else dict(capturable=True, lr=torch.tensor(1e-2, device=DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    return ampplug.initialize(model, optimizer, level, select="all", **settings)


def step_of(model, optimizer, forward=None, clip: float | None = None, micro_batches: int = 1):
    """A training step as users write it."""
    forward = model if forward is None else forward

    def step(x, y):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = (forward(a) - b).square().mean() / micro_batches
            loss.backward()
        if clip is not None:
            ampplug.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return step


def batches(n: int):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(32, 96, generator=generator) * 10.0 ** (i % 2), torch.randn(32, 24, generator=generator)) for i in range(n)]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("level,clip,micro_batches", [("O2", None, 1), ("O2", 0.05, 2), ("O1", None, 1), ("O1", None, 2)])
def test_replays_equal_eager_from_step_0(level, clip, micro_batches, recipe):
    (model, optimizer), (eager, eager_optimizer) = make(level, recipe=recipe), make(level, recipe=recipe)
    fast = ampplug.capture(step_of(model, optimizer, clip=clip, micro_batches=micro_batches), model, optimizer)
    slow = step_of(eager, eager_optimizer, clip=clip, micro_batches=micro_batches)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (optimizer, eager_optimizer)]
    losses = []
    for x, y in batches(12):
        losses.append((fast(x, y), slow(x.to(DEVICE), y.to(DEVICE))))
        for s in schedulers:
            s.step()
    assert fast.graph is not None
    assert all(torch.equal(a, b) for a, b in losses) and len({a.item() for a, _ in losses}) == len(losses)  # results are not overwritten
    assert same(model, eager)
    model.eval(), eager.eval()
    x = batches(1)[0][0].to(DEVICE)
    assert torch.equal(model(x), eager(x))


def test_dropout_differs_from_replay_to_replay():
    model, optimizer = make(dropout=0.5)
    x = torch.randn(32, 96, device=DEVICE)

    def step(x):
        return model(x).detach()

    fast = ampplug.capture(step, model, optimizer)
    outputs = [fast(x) for _ in range(30)]
    assert fast.graph is not None
    assert not torch.equal(outputs[-1], outputs[-2]) and not torch.equal(outputs[-2], outputs[-3])


def test_loss_scaling_acts_on_replay():
    (model, optimizer), (eager, eager_optimizer) = make(), make()
    scalers = [ampplug.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=4) for _ in range(2)]

    def scaled(m, o, scaler):
        def step(x, y):
            o.zero_grad()
            loss = (m(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(o)
            scaler.update()
            return loss.detach()

        return step

    fast = ampplug.capture(scaled(model, optimizer, scalers[0]), model, optimizer)
    slow = scaled(eager, eager_optimizer, scalers[1])
    for i, (x, y) in enumerate(batches(14)):
        if i == 10:
            x = x.clone()
            x[0, 0] = float("inf")
        fast(x, y), slow(x.to(DEVICE), y.to(DEVICE))
    assert fast.graph is not None and same(model, eager)
    assert scalers[0].get_scale() == scalers[1].get_scale() and all(torch.isfinite(p).all() for p in model.parameters())


def test_eager_steps_and_loads_in_between():
    (model, optimizer), (eager, eager_optimizer) = make(), make()
    step, slow = step_of(model, optimizer), step_of(eager, eager_optimizer)
    fast = ampplug.capture(step, model, optimizer)
    data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(20)]
    for x, y in data[:6]:
        fast(x, y), slow(x, y)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    saved_eager = {k: v.clone() for k, v in eager.state_dict().items()}, eager_optimizer.state_dict()
    kept = []
    for x, y in data[6:9]:  # gradients elsewhere
        kept.append([p.grad for p in model.parameters()])
        step(x, y), slow(x, y)
    for x, y in data[9:12]:
        fast(x, y), slow(x, y)
    assert same(model, eager)
    model.load_state_dict(saved[0]), eager.load_state_dict(saved_eager[0])  # weights alone, then the state, too
    for x, y in data[12:14]:
        fast(x, y), slow(x, y)
    assert same(model, eager)
    optimizer.load_state_dict(saved[1]), eager_optimizer.load_state_dict(saved_eager[1])
    with torch.no_grad():
        for m in (model, eager):
            m.up.weight.mul_(1.5)
    for o in (optimizer, eager_optimizer):
        o.param_groups[0].update(weight_decay=0.3, betas=(0.8, 0.99))
    for x, y in data[14:]:
        fast(x, y), slow(x, y)
    assert same(model, eager)


def test_a_moved_model_is_captured_anew():
    model, optimizer = make()
    fast = ampplug.capture(step_of(model, optimizer), model, optimizer)
    for x, y in batches(6):
        fast(x, y)
    first = fast.graph
    with torch.no_grad():
        model.up.weight.data = model.up.weight.data.clone()
    before = model.up.weight.detach().clone()
    fast(*batches(1)[0])
    assert fast.graph is not first and not torch.equal(model.up.weight, before)


def test_compiled_and_captured():
    (model, optimizer), (eager, eager_optimizer) = make(), make()
    compiled = torch.compile(model, fullgraph=True)
    fast = ampplug.capture(step_of(model, optimizer, compiled), model, optimizer)
    slow = step_of(eager, eager_optimizer)
    for x, y in batches(10):
        a, b = fast(x, y), slow(x.to(DEVICE), y.to(DEVICE))
        assert abs(a - b) < 0.05 * b
    assert fast.graph is not None
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert (p.float() - q.float()).norm() < 0.05 * q.float().norm()


def test_compiled_takes_the_same_launches():
    """A cast, a GEMM; a cast, two GEMMs: operators add none, and nothing copies the arrays of scales."""
    from test_gpu import profile_kernels

    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False, device=DEVICE, dtype=torch.bfloat16)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters()), select="all")
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16)

    def run():
        model.weight.grad = x.grad = None
        compiled(x).backward(dy)

    for _ in range(3):
        run()
        optimizer.step()
        torch.cuda.synchronize()
    names = profile_kernels(run)
    assert len(names) <= 5, names


def test_what_cannot_be_captured_is_named():
    model, optimizer = make()

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()  # the culprit

    fast = ampplug.capture(step, model, optimizer)
    with pytest.raises(RuntimeError, match=r"test_capture.py:\d+: `return loss.item\(\)"):
        for x, y in batches(8):
            fast(x, y)
    plain = torch.optim.AdamW(nn.Linear(4, 4, device=DEVICE).parameters())
    other, _ = make("O1")
    fast = ampplug.capture(lambda x: other(x).sum(), other, plain)
    with pytest.raises(RuntimeError, match="capturable"):
        for x, _ in batches(30):
            fast(x)


def test_batches_that_differ_are_refused():
    model, optimizer = make()
    fast = ampplug.capture(step_of(model, optimizer), model, optimizer)
    for x, y in batches(6):
        fast(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"\[16, 96\].*\[32, 96\].*drop_last"):
        fast(x[:16], y[:16])
    with pytest.raises(ValueError, match="torch.float64"):
        fast(x.double(), y)
    with pytest.raises(ValueError, match="built as"):
        fast(x, y=y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_graphed_callables():
    """torch's own capture of parts of a model, with the optimizer outside."""
    runs = []
    for graphed in (False, True):
        model, optimizer = make()
        step = step_of(model, optimizer)
        for x, y in batches(3):
            step(x.to(DEVICE), y.to(DEVICE))
        torch.cuda.synchronize()
        if graphed:
            sample = torch.randn(32, 96, device=DEVICE)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = step_of(model, optimizer, torch.cuda.make_graphed_callables(model, (sample,)))
            model._modules["up"]._ampplug.book.amax.zero_()  # what its warm-up recorded
        for x, y in batches(6)[3:]:
            step(x.to(DEVICE), y.to(DEVICE))
        runs.append(model)
    assert same(*runs)
