"""RMSNorms that cast for the layers that read them: which norms, for whom, and the same numbers as a norm and a cast apart, wherever a model may run."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampplug
from ampplug.kernels import rms_norm as kernels
from ampplug.kernels.triton_runtime import launches
from ampplug.nn import linear_function, norm, norm_function

pytestmark = pytest.mark.filterwarnings("ignore:ampplug")
WIDTH = 48


class Llama(nn.Module):
    """Of Hugging Face's kind."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon, self.count = nn.Parameter(torch.ones(width)), eps, 2

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Late(Llama):
    def forward(self, x):
        h = x.float()
        return (h * (h.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight).type_as(x)


def other(forward):
    return type("Other", (Llama,), {"forward": forward})


def _idle(self, x):
    h = x.float()
    unused = h.square()
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


OTHER = {
    "an idle operation": other(_idle),
    "one more than the weight": other(lambda s, x: ((1.0 + s.weight) * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + s.variance_epsilon)).to(x.dtype))),
    "no fp32": other(lambda s, x: s.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.variance_epsilon)).to(x.dtype)),
    "another axis": other(lambda s, x: s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-2, keepdim=True) + s.variance_epsilon)).to(x.dtype)),
    "cubes": other(lambda s, x: s.weight * (x.float() * torch.rsqrt(x.float().pow(3).mean(-1, keepdim=True) + s.variance_epsilon)).to(x.dtype)),
    "no eps": other(lambda s, x: s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))).to(x.dtype)),
    "eps by a count": other(lambda s, x: s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + s.count)).to(x.dtype)),
    "weight twice": other(lambda s, x: s.weight * s.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + s.variance_epsilon)).to(x.dtype)),
    "layer norm": lambda width: nn.LayerNorm(width), "no weight": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "two dimensions": lambda width: nn.RMSNorm((2, width)), "odd width": lambda width: nn.RMSNorm(40), "subclass": type("Mine", (nn.RMSNorm,), {}),
}  # fmt: skip


class Model(nn.Module):
    """Two blocks: a norm, three layers that read it, and one that does not."""

    def __init__(self, kind=nn.RMSNorm, width: int = WIDTH, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList([kind(width) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.ModuleDict({n: nn.Linear(width, width, bias=False) for n in "qkvo"}) for _ in range(2)])
        self.recompute: bool | None = None
        self.to(dtype)

    def block(self, x, i: int):
        h, b = self.norms[i](x), self.blocks[i]
        return x + b["o"](torch.tanh(b["q"](h)) * b["k"](h) + b["v"](h)).to(x.dtype)

    def forward(self, x):
        for i in range(2):
            x = self.block(x, i) if self.recompute is None else checkpoint(self.block, x, i, use_reentrant=self.recompute)
        return x


def make(kind=nn.RMSNorm, width: int = WIDTH, dtype=torch.float32, level: str = "O2", **settings):
    model = Model(kind, width, dtype)
    return ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, select="all", **settings)


def train(model, optimizer, forward=None, steps: int = 4, autocast: bool = False, dtype=torch.float32) -> list[torch.Tensor]:
    width = model.norms[0].weight.shape[0]
    seen = []
    for t in range(steps):
        x = (torch.randn(3, 7, width, generator=torch.Generator().manual_seed(t)) * 10.0 ** (t % 3)).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = (model if forward is None else forward)(x)
        y.float().square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *[p.detach().clone() for p in model.parameters()]]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def casts(monkeypatch) -> Counter:
    """How often a norm has cast, and how often a layer has cast an input of its own."""
    made: Counter = Counter()
    for module, who in ((norm_function, "norm"), (linear_function, "layer")):
        real = module.quantize
        counted = lambda x, book, slot, p, dtype, *a, real=real, who=who: made.update([who] * (dtype == torch.float8_e4m3fn)) or real(x, book, slot, p, dtype, *a)  # noqa: E731
        monkeypatch.setattr(module, "quantize", counted)
    return made


def test_norms_are_found():
    for kind, names in ((nn.RMSNorm, ("weight", "eps", False, True)), (Llama, ("weight", "variance_epsilon", True, False)), (Late, ("weight", "variance_epsilon", False, False))):
        assert ampplug.plan(Model(kind), select="all").norms == {"norms.0": names, "norms.1": names}
    assert "2 norms cast for them" in str(ampplug.plan(Model(), select="all"))
    assert not ampplug.plan(Model(), select="all", fuse=False).norms
    assert not ampplug.plan(nn.Sequential(nn.RMSNorm(16)), select="all").norms  # nobody to cast for


@pytest.mark.parametrize("name", list(OTHER))
def test_other_norms_are_none(name: str):
    assert not norm.find_norms(nn.Sequential(OTHER[name](WIDTH)))


def test_huggingface():
    transformers = pytest.importorskip("transformers")
    for family, early in (("Llama", True), ("Mistral", True), ("Qwen2", True), ("Qwen3", True), ("Olmo2", False), ("Gemma", None), ("Gemma2", None)):
        module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        found = norm.find_norms(getattr(module, f"{family}RMSNorm")(64))
        assert found == ({} if early is None else {"": ("weight", "variance_epsilon", early, False)}), (family, transformers.__version__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.RMSNorm, Llama])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_same_numbers_and_no_more_casts(kind, recipe: str, autocast: bool, dtype, casts):
    runs, counts = [], []
    for fuse in (True, False):
        casts.clear()
        runs.append(train(*make(kind, dtype=dtype, recipe=recipe, fuse=fuse), autocast=autocast, dtype=dtype))
        counts.append(dict(casts))
    assert equal(*runs)
    # two inputs a block and step: a norm's, from the second step on, and the last layer's
    assert counts == [{"layer": 10, "norm": 6} if recipe == "delayed" else {"layer": 16}, {"layer": 16}]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant: bool, casts):
    runs = []
    for recompute in (reentrant, None):
        model, optimizer = make()
        model.recompute = recompute
        runs.append(train(model, optimizer))
    assert equal(*runs) and casts["norm"] == 12 + 6


def test_evaluation(casts):
    """expect: evaluation has no casts by a norm and leaves no trace."""
    model, optimizer = make()
    train(model, optimizer)
    book = model.blocks[0]["q"]._ampplug.book
    before = [t.clone() for t in (book.amax, book.scale, book.history)]
    casts.clear()
    x = torch.randn(5, WIDTH)
    model.eval()
    with torch.no_grad():
        y = model(x)
    assert not casts["norm"] and all(torch.equal(a, b) for a, b in zip(before, (book.amax, book.scale, book.history), strict=True))
    plain, plain_optimizer = make(fuse=False)
    train(plain, plain_optimizer)
    plain.eval()
    assert torch.equal(plain(x), y)
    model.train()
    with torch.no_grad():  # as in the first pass of reentrant checkpointing
        model(x)
    assert casts["norm"] == 2 and torch.equal(book.amax, before[0])


def test_transposes_are_made_for_layers_that_are_trained(casts):
    """expect: none for frozen layers; once they are trained, their own cast in one pass, the norm's from the next on."""
    model, optimizer = make()
    for block in model.blocks:
        block["q"].requires_grad_(False), block["k"].requires_grad_(False), block["v"].requires_grad_(False)
    x = torch.randn(5, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    producer = model.norms[0]._ampplug_producer
    assert not producer.transpose and casts["norm"] == 2
    model.requires_grad_(True)
    for _ in range(2):
        casts.clear()
        model(x).sum().backward()
        assert model.blocks[0]["v"].weight.grad.any() and producer.transpose
    assert casts == {"norm": 2, "layer": 2}


def test_whom_it_casts_for(casts):
    """Learned from the layer that cast its output, forgotten when nobody takes what it made, and learned anew."""
    model, optimizer = make()
    train(model, optimizer, steps=2)
    producer, block = model.norms[0]._ampplug_producer, model.blocks[0]
    assert producer.target is block["q"]._ampplug
    x = torch.randn(5, WIDTH)
    casts.clear()
    h = model.norms[0](x)  # nobody reads it
    assert casts == {"norm": 1}
    model.norms[0](x)
    assert casts == {"norm": 1} and producer.target is None
    h = model.norms[0](x)
    block["o"](h)
    assert producer.target is block["o"]._ampplug and casts == {"norm": 1, "layer": 1}
    h = model.norms[0](x)
    y = block["o"](h)
    assert casts == {"norm": 2, "layer": 1}
    with torch.no_grad():
        h.mul_(2.0)  # what was cast is not this any more
    assert torch.allclose(block["v"](h).norm() / block["v"](h * 1.0).norm(), torch.ones(())) and casts == {"norm": 2, "layer": 3}
    assert y.shape == (5, WIDTH)


def test_no_cast_of_what_is_gone():
    model, optimizer = make()
    train(model, optimizer, steps=2)
    bank = model.blocks[0]["q"]._ampplug.bank
    h = model.norms[0](torch.randn(5, WIDTH))
    assert bank.shared is not None
    del h
    assert bank.shared is None


@pytest.mark.parametrize("kind", [nn.RMSNorm, Llama])
def test_copies_pickles_and_the_way_back(kind):
    from ampplug.convert import restore_layers

    model, optimizer = make(kind, level="O1")
    train(model, optimizer, steps=2)
    x = torch.randn(5, WIDTH)
    wanted = [model(x), model(x)][1]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(3):
            assert torch.equal(other(x), wanted)
        assert type(other.norms[0]) is type(model.norms[0]) and isinstance(other.norms[0], kind)
        assert other.norms[0]._ampplug_producer.target is not model.norms[0]._ampplug_producer.target
        other(x).sum().backward()
        assert other.norms[0].weight.grad is not None
    assert list(model.state_dict()) == list(Model(kind).state_dict())
    restore_layers(model)
    assert [(type(m), set(vars(m))) for m in model.modules()] == [(type(m), set(vars(m))) for m in Model(kind).modules()]


@pytest.mark.parametrize("kind", [nn.RMSNorm, Llama])
def test_compiled_equals_eager(kind):
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model, optimizer = make(kind)
        runs.append(train(model, optimizer, torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else None))
    assert equal(*runs)


def test_odd_calls():
    """What the kernel or a cast cannot take is left to the module itself."""
    for kind in (nn.RMSNorm, Llama):
        model, optimizer = make(kind)
        train(model, optimizer, steps=2)
        n, plain = model.norms[0], kind(WIDTH)
        plain.load_state_dict(n.state_dict())
        for x in (torch.randn(2, WIDTH, dtype=torch.float64), torch.zeros(0, WIDTH), torch.randn(WIDTH, 3).t(), torch.randn(WIDTH)):
            assert torch.equal(n(x), plain(x)) and n(x).dtype == plain(x).dtype
        name = kind.forward.__code__.co_varnames[1]
        assert torch.equal(n(**{name: x}), plain(x))
        with pytest.raises(TypeError, match="argument"):
            n(x, x)
        assert torch.allclose(torch.func.vmap(n)(torch.randn(2, 3, WIDTH)), plain(torch.randn(2, 3, WIDTH)), atol=10.0)
        assert torch.equal(torch.func.functional_call(n, {"weight": torch.zeros(WIDTH)}, (torch.randn(2, WIDTH),)), torch.zeros(2, WIDTH))


# ---------------------------------------------------------------- by the kernels, which the interpreter runs


@pytest.fixture
def by_kernel(monkeypatch):
    """Norms take the GPU's way; layers stay with torch."""
    pytest.importorskip("triton")
    for module in (norm, kernels):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    launches.clear()


@pytest.mark.parametrize("kind", [nn.RMSNorm, Llama])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_in_a_model(kind, dtype, by_kernel, casts, monkeypatch):
    """One launch forward, one backward, and no cast by the layers that read it. Numbers: a norm's, up to the order of sums."""
    model, optimizer = make(kind, 512, dtype)
    found = train(model, optimizer, steps=3, dtype=dtype)
    assert launches == {"rms_norm_kernel": 6, "rms_norm_backward_kernel": 6} and casts == {"layer": 8}  # the norms' outputs only in the first step
    plain, plain_optimizer = make(kind, 512, dtype, fuse=False)
    wanted = train(plain, plain_optimizer, steps=3, dtype=dtype)
    first = 2 + len(list(model.parameters()))
    for a, b in zip(found[:first], wanted[:first], strict=True):
        assert a.dtype == b.dtype and (a.float() - b.float()).norm() <= 0.05 * b.float().norm()
    for a, b in zip(found[2 * first : 2 * first + 2], wanted[2 * first : 2 * first + 2], strict=True):
        assert (a.float() - b.float()).norm() <= 0.15 * b.float().norm()
    assert not torch.equal(found[-1], Model(kind, 512, dtype).norms[0].weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_kernels_under_recomputation(reentrant: bool, by_kernel):
    """What is saved for backward does not depend on what was learned meanwhile."""
    runs = []
    for recompute in (reentrant, None):
        model, optimizer = make(Llama, 512)
        model.recompute = recompute
        runs.append(train(model, optimizer, steps=3))
    assert equal(*runs)


def test_kernels_keep_the_rules_of_dtypes(by_kernel):
    for kind in (nn.RMSNorm, Llama, Late):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for weight in (torch.float32, torch.bfloat16):
                n = kind(512).to(weight)
                model = nn.ModuleList([n, nn.Linear(512, 16)])
                ampplug.initialize(model, None, "O1", select="all")
                x = torch.randn(2, 3, 512).to(dtype)
                before = Counter(launches)
                y = n(x)
                assert launches["rms_norm_kernel"] == before["rms_norm_kernel"] + 1
                n.eval()
                wanted = n(x)
                assert y.dtype == wanted.dtype and torch.allclose(y.float(), wanted.float(), rtol=0.01, atol=0.01)


def test_narrow_norms_stay_as_they_are(by_kernel):
    model, optimizer = make(nn.RMSNorm, 64)
    train(model, optimizer, steps=2)
    assert not launches["rms_norm_kernel"]
