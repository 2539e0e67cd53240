"""What only a GPU with FP8 units can show: native GEMMs, capture, launches, synchronisation, memory. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import ampplug
from ampplug.kernels.triton_runtime import launches

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference b."""
    return ((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()).item()


def mlp(*sizes: int, bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A stack of Linears on the GPU."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(i, o, bias=bias) for i, o in zip(sizes, sizes[1:], strict=False)]).to(DEVICE, dtype)


def start(model: nn.Module, level: str = "O2", lr: float = 1e-2, **settings):
    """initialize with every layer converted, however small."""
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), level, select="all", **settings)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m,k,n", [(1, 256, 512), (7, 100, 30), (50, 48, 17), (18, 1, 16), (33, 16, 1), (256, 512, 384)])
def test_native_linear(m: int, k: int, n: int, dtype: torch.dtype, recipe: str):
    model = mlp(k, n, dtype=dtype)
    reference = copy.deepcopy(model).float()
    # no Adam: torch's own gives NaN on fp16 parameters, whose eps rounds to zero
    model, optimizer = ampplug.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), "O1", select="all", recipe=recipe)
    for step in range(3):  # just in time, then delayed
        x = torch.randn(m, k, device=DEVICE, dtype=dtype)
        g = torch.randn(m, n, device=DEVICE, dtype=dtype)
        a, b = x.clone().requires_grad_(), x.float().clone().requires_grad_()
        model.zero_grad()
        reference.zero_grad()
        y, z = model(a), reference(b)
        y.backward(g)
        z.backward(g.float())
        assert y.dtype == dtype and relative(y, z) < 0.10
        assert relative(a.grad, b.grad) < 0.15
        assert relative(model[0].weight.grad, reference[0].weight.grad) < 0.15
        assert relative(model[0].bias.grad, reference[0].bias.grad) < 0.02
        optimizer.step()


@pytest.mark.parametrize("m", [16, 130])
def test_gpu_equals_emulation(m: int):
    """The same bits of FP8 on both, so outputs differ by the GEMM's own rounding only."""
    cpu = mlp(96, 64, bias=False).cpu()
    gpu = copy.deepcopy(cpu).to(DEVICE)
    cpu, cpu_optimizer = start(cpu)
    gpu, gpu_optimizer = start(gpu)
    for step in range(4):
        x = torch.randn(m, 96, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3)
        outputs = [model(x.to(device)) for model, device in ((cpu, "cpu"), (gpu, DEVICE))]
        assert relative(outputs[1].cpu(), outputs[0]) < 2e-3
        for y, optimizer in zip(outputs, (cpu_optimizer, gpu_optimizer), strict=True):
            y.square().mean().backward()
        grads = cpu[0].weight.grad, gpu[0].weight.grad.cpu()
        assert relative(grads[1], grads[0]) < 2e-2  # bf16 gradients
        gpu[0].weight.grad.copy_(grads[0])
        cpu_optimizer.step()
        gpu_optimizer.step()
        assert relative(gpu[0].weight.cpu(), cpu[0].weight) < 1e-3
        cpu_optimizer.zero_grad()
        gpu_optimizer.zero_grad()


def test_captured_steps_equal_eager_ones():
    """Forward, backward and step in one graph: amaxes, scales, step counts and gradients advance on replay; later eager steps do not disturb it."""

    def make():
        model = mlp(64, 128, 64)
        return start(model)

    xs = [10.0 ** (t % 3) * torch.randn(32, 64, device=DEVICE) for t in range(8)]
    x = xs[0].clone()
    (model, optimizer), (eager, eager_optimizer) = make(), make()

    def one(m, o, inputs):
        o.zero_grad(set_to_none=False)
        m(inputs).square().mean().backward()
        o.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        one(eager, eager_optimizer, xs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(model, optimizer, x)
    for t in range(8):
        x.copy_(xs[t])
        graph.replay()
        one(eager, eager_optimizer, xs[t])
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)
    # the weights changed by replay are seen by the next forward, in training and in evaluation
    assert torch.equal(model(xs[1]), eager(xs[1]))
    model.eval(), eager.eval()
    assert torch.equal(model(xs[2]), eager(xs[2]))
    model.train(), eager.train()
    # eager steps with gradients elsewhere, then the graph again
    kept = [p.grad for p in model.parameters()]
    for m, o in ((model, optimizer), (eager, eager_optimizer)):
        o.zero_grad()
        m(xs[3]).square().mean().backward()
        o.step()
    for p, g in zip(model.parameters(), kept, strict=True):
        p.grad = g
    x.copy_(xs[4])
    graph.replay()
    one_more = [p.grad for p in eager.parameters()]
    assert one_more
    one(eager, eager_optimizer, xs[4])
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


def profile_kernels(run) -> list[str]:
    """Names of the kernels, copies and fills that `run` puts on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        run()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in events if not e.name.startswith("Optimizer.")]  # an annotation, not a launch


def settled(*sizes: int, **settings):
    """A model and optimizer whose slots all have scales, and the host knows."""
    model, optimizer = start(mlp(*sizes, bias=False, dtype=torch.bfloat16), **settings)
    x = torch.randn(256, sizes[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    model(x)
    assert all(model[0]._ampplug.book.known)
    return model, optimizer, x


def test_launches_of_a_linear():
    """Forward cast and GEMM, backward cast and two GEMMs."""
    model, optimizer, x = settled(512, 512)
    dy = torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16)

    def run():
        model[0].weight.grad = None
        x.grad = None
        model(x).backward(dy)

    names = profile_kernels(run)
    assert len(names) <= 5, names


@pytest.mark.parametrize("layers", [3, 40])
def test_launches_of_a_step(layers: int):
    """Step, transpose, scale update, and one for the norm: whatever the number of tensors."""
    model, optimizer, x = settled(*[256] * (layers + 1))
    model(x).sum().backward()

    def run():
        ampplug.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    names = profile_kernels(run)
    launches.clear()
    run()
    assert sum(launches.values()) == 4, launches
    assert len(names) == 4, names


def test_no_synchronisation():
    model, optimizer, x = settled(512, 512, 512)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(x).float().square().mean().backward()
            ampplug.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[model[0].weight]["step"].item() == 6  # and the steps were taken


def test_just_in_time_until_the_first_update_survives_skipped_steps():
    """Loss scales that overflow skip steps: slots stay without a scale on the device, and casts stay just in time."""
    model, optimizer = start(mlp(64, 64))
    reference = copy.deepcopy(mlp(64, 64))
    scaler = ampplug.GradScaler(DEVICE, init_scale=2.0**120)
    x = torch.randn(32, 64, device=DEVICE)
    for _ in range(4):
        scaler.scale(model(x).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    assert (model[0]._ampplug.book.scale == 0).any()
    assert relative(model(x), reference(x)) < 0.10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_billion_parameters(dtype: torch.dtype):
    """Parameters, remainders, moments, FP8 copies and gradients: at most 10.1 bytes a parameter."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(2048)
            shapes = dict(q=(2048, 2048), k=(2048, 512), v=(2048, 512), o=(2048, 2048), gate=(2048, 8192), up=(2048, 8192), down=(8192, 2048))
            for name, (i, o) in shapes.items():
                setattr(self, name, nn.Linear(i, o, bias=False))

        def forward(self, x):
            h = self.norm(x)
            h = self.o(self.q(h) + torch.cat([self.k(h), self.v(h)] * 2, -1))
            return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))

    with torch.device(DEVICE):
        model = nn.Sequential(nn.Embedding(32768, 2048), *[Block() for _ in range(16)], nn.Linear(2048, 32768, bias=False)).to(dtype)
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), "O2", select=["*.q", "*.k", "*.v", "*.o", "*.gate", "*.up", "*.down"])
    ids = torch.randint(0, 32768, (1, 64), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(ids).float().square().mean()
    loss.backward()
    optimizer.step()
    del loss
    gc.collect()
    size = (torch.cuda.memory_allocated() - before) / parameters
    print(f"{dtype}: {size:.3f} bytes a parameter, {parameters} parameters")
    assert size <= 10.1


def test_more_elements_than_32_bits_hold():
    n = 2**31 + 4096 + 24
    p = nn.Parameter(torch.zeros(n, device=DEVICE, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], lr=0.5, weight_decay=0.0)
    module = nn.ParameterList([p])
    with pytest.warns(UserWarning, match="no layer"):
        module, optimizer = ampplug.initialize(module, optimizer)
    p.grad = torch.ones(n, device=DEVICE, dtype=torch.bfloat16)
    optimizer.step()
    for part in (p[:100], p[2**30 : 2**30 + 100], p[-100:]):
        assert torch.allclose(part.float(), torch.full_like(part, -0.5).float(), atol=2e-3)
    del p, optimizer, module
    gc.collect()
    torch.cuda.empty_cache()


def test_w8t_is_the_transpose():
    """Both FP8 copies agree after steps, for shapes that fill tiles and for those that do not."""
    for sizes in ((256, 512), (72, 200), (16, 1000)):
        model, optimizer = start(mlp(*sizes))
        for _ in range(2):
            model(torch.randn(32, sizes[0], device=DEVICE)).square().mean().backward()
            optimizer.step()
        for w in model[0]._ampplug.bank.weights:
            assert torch.equal(w.w8.view(torch.uint8).t(), w.w8t.view(torch.uint8))
            value = w.master.value() * w.scale
            assert torch.equal(w.own_w8.float(), value.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_grad_scaler_trains():
    """A finite loss scale changes nothing; one that overflows skips the step."""
    runs = []
    for scale in (None, 1024.0):
        model, optimizer = start(mlp(64, 64))
        scaler = ampplug.GradScaler(DEVICE, init_scale=scale or 1.0, enabled=scale is not None)
        for t in range(4):
            torch.manual_seed(t)
            scaler.scale(model(torch.randn(32, 64, device=DEVICE)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append(model[0].weight.detach().float().clone())
    assert relative(*runs) < 2e-3
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.full((32, 64), float("inf"), device=DEVICE)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) and scaler.get_scale() == 512.0


class _Block(nn.Module):
    """RMSNorm, siblings, SwiGLU."""

    def __init__(self, width: int = 512):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        h = self.norm_1(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(*(f(h).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", ["eager", "compile", "graph", "both"])
def test_own_counter_equals_the_profilers_in_a_whole_step(level: str, way: str):
    """A small Llama's step with clipping: every kernel of ours that the profiler sees, the counter saw, and no other. A replay launches from the host
    nothing, and puts on the GPU what its recording counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 512), _Block(), _Block(), nn.Linear(512, 256, bias=False)).to(DEVICE, torch.bfloat16)
    options = {} if level == "O2" else dict(capturable=True)
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4, **options), level, select=["1.*", "2.*"])
    run = torch.compile(model) if way in ("compile", "both") else model

    def step(ids):
        optimizer.zero_grad()
        loss = run(ids).float().square().mean()
        loss.backward()
        ampplug.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    ids = torch.randint(0, 256, (2, 128), device=DEVICE)
    fast = ampplug.capture(step, model, optimizer) if way in ("graph", "both") else step
    recorded: dict[str, int] = {}
    for _ in range(8):
        before = launches.copy()
        was_recorded = getattr(fast, "graph", None) is not None
        fast(ids)
        torch.cuda.synchronize()
        if not was_recorded and getattr(fast, "graph", None) is not None:
            recorded = dict(launches - before)
    from torch.profiler import ProfilerActivity, profile

    before = launches.copy()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        fast(ids)
        torch.cuda.synchronize()
    own = dict(launches - before)
    names = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ours = {"partial_amax_kernel", "cast_kernel", "adam_step_kernel", "transpose_kernel", "norm_kernel", "scale_update_kernel", "weight_amax_kernel",
            "weight_cast_kernel", "swiglu_kernel", "partial_amaxes_kernel", *recorded, *own}  # fmt: skip
    seen = {name: names.count(name) for name in ours if name in names}
    if way in ("graph", "both"):
        assert fast.graph is not None and not own, own
        assert seen == recorded, (seen, recorded)
    else:
        assert seen == own, (seen, own)
    optimizing = sum(seen.get(n, 0) for n in ("norm_kernel", "adam_step_kernel", "transpose_kernel", "scale_update_kernel", "weight_amax_kernel", "weight_cast_kernel"))
    assert optimizing <= 4, seen
    assert seen["cast_kernel"] <= 14 + 14, seen  # at most two for each of the 14 layers


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_fp32_gradients(backend):
    """Summed in fp32, from GEMMs with fp32 output; the first one is the GEMM's own tensor; the step takes them."""
    model, optimizer = start(mlp(256, 512, bias=False, dtype=torch.bfloat16), grad_dtype="fp32", power_of_two=True)
    run = torch.compile(model, backend=backend) if backend else model
    x = torch.ones(16, 256, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(300):
        run(x).backward(torch.ones(16, 512, device=DEVICE, dtype=torch.bfloat16) / 16)
    grad = model[0].weight.grad
    assert grad.dtype == torch.float32 and (grad == 300).all()
    before = model[0].weight.detach().clone()
    ampplug.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    optimizer.zero_grad()
    names = profile_kernels(lambda: (optimizer.zero_grad(), run(x).backward(torch.ones(16, 512, device=DEVICE, dtype=torch.bfloat16))))
    assert not [n for n in names if "Memcpy DtoD" in n], names
