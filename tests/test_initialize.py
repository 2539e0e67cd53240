"""initialize and plan: what is accepted, what is refused before anything changed, and what stays the same object."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import ampplug
from ampplug.kernels.triton_runtime import check_fp8_support


def net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(i, o) for i, o in zip(sizes, sizes[1:])])


def adamw(model: nn.Module, **settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})


def test_signature():
    names = list(inspect.signature(ampplug.initialize).parameters)
    assert names[:7] == ["model", "optimizer", "opt_level", "backend", "recipe", "select", "use_te"]
    assert inspect.signature(ampplug.initialize).parameters["opt_level"].default == "O2"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_identities_are_kept(level):
    model = net(32, 32, 8)
    optimizer = adamw(model)
    modules, parameters, names = list(model.modules()), list(model.parameters()), list(model.state_dict())
    returned = ampplug.initialize(model, optimizer, level)
    assert returned[0] is model and returned[1] is optimizer
    assert all(a is b for a, b in zip(modules, model.modules())) and all(a is b for a, b in zip(parameters, model.parameters()))
    assert all(type(p) is nn.Parameter for p in parameters) and isinstance(model[0], nn.Linear)
    assert list(model.state_dict()) == names and isinstance(optimizer, torch.optim.AdamW)
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in parameters]


def snapshot(model, optimizer):
    return (
        [type(m) for m in model.modules()],
        [(p.dtype, p.data_ptr(), p.detach().clone()) for p in model.parameters()],
        None if optimizer is None else (type(optimizer), dict(optimizer.state), copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])),
    )  # fmt: skip


def half_a_model():
    model = net(32, 32)
    model[0].bias.data = model[0].bias.data.half()
    return model, adamw(model)


def lazy():
    model = nn.Sequential(nn.LazyLinear(8))
    return model, torch.optim.AdamW([nn.Parameter(torch.zeros(1))])


def meta():
    with torch.device("meta"):
        model = net(8, 8)
    return model, adamw(model)


def patched_step():
    model = net(8, 8)
    optimizer = adamw(model)
    optimizer.step = lambda: None
    return model, optimizer


def shared_parameter():
    model = net(8, 8)
    return model, [adamw(model), adamw(model)]


REFUSED = [
    (half_a_model, {}, ValueError, "'0.bias'.*float16.*O1"),
    (lazy, {}, ValueError, "not initialized"),
    (meta, {}, ValueError, "meta device"),
    (patched_step, {}, ValueError, "step method was replaced"),
    (shared_parameter, {}, ValueError, "more than one optimizer"),
    (lambda: (net(8, 8), None), {}, ValueError, "optimizer is None.*O1"),
    (lambda: (m := net(8, 8), adamw(m, amsgrad=True)), {}, ValueError, "amsgrad.*O1"),
    (lambda: (m := net(8, 8), torch.optim.SGD(m.parameters())), {}, ValueError, "SGD.*AdamW.*O1"),
    (lambda: (m := net(8, 8), adamw(m)), {"use_te": True}, ValueError, "Transformer Engine.*'native'"),
    (lambda: (m := net(8, 8), adamw(m)), {"histroy": 3}, ValueError, "histroy.*history"),
    (lambda: (m := net(8, 8), adamw(m)), {"config": {"recipe": "delayed"}, "recipe": "current"}, ValueError, "recipe.*both"),
    (lambda: (net(8, 8), "adam"), {}, TypeError, "optimizer is a str"),
    (lambda: ("model", None), {}, TypeError, "model is a str"),
]


@pytest.mark.parametrize("build,settings,error,message", REFUSED)
def test_refused_before_anything_changed(build, settings, error, message):
    model, optimizer = build()
    single = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    comparable = isinstance(model, nn.Module) and build not in (lazy, meta)
    before = snapshot(model, single) if comparable else None
    with pytest.raises(error, match=message):
        ampplug.initialize(model, optimizer, **settings)
    if before is not None:
        after = snapshot(model, single)
        assert before[0] == after[0] and before[2] == after[2]
        assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before[1], after[1]))


def test_twice_is_refused():
    model = net(32, 32)
    optimizer = adamw(model)
    ampplug.initialize(model, optimizer, "O1")
    with pytest.raises(RuntimeError, match="already"):
        ampplug.initialize(model, adamw(model), "O1")
    with pytest.raises(RuntimeError, match="already"):
        ampplug.initialize(net(8, 8), optimizer, "O1")


def test_nothing_converted_says_why():
    with pytest.warns(UserWarning, match="no layer of the model computes in FP8: .*head"):
        ampplug.initialize(nn.ModuleDict({"lm_head": nn.Linear(8, 8)}), m_optimizer := torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    assert m_optimizer is not None


def test_dry_run_changes_nothing():
    model = net(8, 8)
    optimizer = adamw(model)
    before = snapshot(model, optimizer)
    assert ampplug.initialize(model, optimizer, "O0") == (model, optimizer)
    assert snapshot(model, optimizer)[0] == before[0]


def test_ddp_wrapped_first_is_refused_where_dtypes_change():
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = Wrapped(net(8, 8))
    with pytest.raises(ValueError, match="initialize first"):
        ampplug.initialize(model, adamw(model))
    ampplug.initialize(model, adamw(model), "O1")
    assert model(torch.ones(2, 8)).shape == (2, 8)
    model = Wrapped(net(8, 8).bfloat16())
    ampplug.initialize(model, adamw(model))


def test_attention_and_encoder_layers():
    """Weights that no Linear's forward reads stay as they are, in training and in torch's fused inference."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), 2)
    reference = copy.deepcopy(model)
    optimizer = adamw(model, lr=1e-4)
    ampplug.initialize(model, optimizer)
    assert model.layers[0].self_attn.in_proj_weight.dtype == torch.float32 and model.layers[0].self_attn.out_proj.weight.dtype == torch.float32
    x = torch.randn(2, 5, 64)
    model(x).square().sum().backward()
    optimizer.step()
    for mode in (True, False):
        model.train(mode), reference.train(mode)
        with torch.no_grad():
            y, z = model(x), reference(x)
        assert (y - z).norm() / z.norm() < 0.10


def test_plan_says_what_and_why():
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 32), "body": nn.Linear(32, 32), "norm": nn.LayerNorm(32), "lm_head": nn.Linear(32, 16, bias=False)})
    model["lm_head"].weight = model["embedding"].weight
    plan = ampplug.plan(model, adamw(model))
    assert plan.converted == ("body",)
    text = str(plan)
    assert "split master" in text and "fp32 -> bf16" in text and "bytes per parameter" in text and "head" in text
    kinds = plan.bytes_per_parameter()
    assert kinds["total"] <= 10.1 and kinds["before"] == 16
    everything = ampplug.plan(model, adamw(model), select="all")
    tied = next(p for p in everything.parameters if p.name == "embedding.weight")
    assert tied.becomes == "fp32 master" and tied.fp8 and "also read by embedding" in tied.why
    assert ampplug.plan(model, adamw(model), select=["bod*"]).converted == ("body",)
    assert ampplug.plan(model, adamw(model), select=lambda name, module: module.out_features == 16).converted == ("lm_head",)


def test_schedulers_before_and_after():
    """A scheduler made before initialize goes on with the same object, without spurious warnings; OneCycleLR also moves beta1."""
    for before in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="ampplug: no FP8")
            model = net(32, 32)
            optimizer = adamw(model)
            make = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20)  # noqa: E731
            schedule = make(optimizer) if before else None
            ampplug.initialize(model, optimizer)
            schedule = schedule or make(optimizer)
            rates = []
            for _ in range(10):
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
            assert len(set(rates)) == 10


def test_fp8_support_is_explained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (8, 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"8\.9.*8\.0"):
            check_fp8_support("cuda")
    with pytest.raises(RuntimeError, match="'cpu'"):
        check_fp8_support("cpu")
