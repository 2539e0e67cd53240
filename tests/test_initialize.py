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
    (lambda: (m := net(8, 8), adamw(m)), {"use_te": True}, RuntimeError, "Transformer Engine is not installed.*'native'"),
    (lambda: (m := net(8, 8), adamw(m)), {"histroy": 3}, ValueError, "histroy.*history"),
    (lambda: (m := net(8, 8), adamw(m)), {"config": {"recipe": "delayed"}, "recipe": "current"}, ValueError, "recipe.*config has.*once"),
    (lambda: (m := net(8, 8), adamw(m)), {"config": ampplug.Config(opt_level="O1"), "opt_level": "O2"}, ValueError, "opt_level='O2'.*'O1'"),
    (lambda: (net(8, 8), adamw(net(8, 8))), {}, ValueError, "none of them the model's"),
    (lambda: (net(8, 8), adamw(net(8, 8))), {"opt_level": "O1"}, ValueError, "none of them the model's"),
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
        ampplug.initialize(model := nn.ModuleDict({"lm_head": nn.Linear(8, 8)}), adamw(model))


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


def dtensor():
    """A sharded parameter, on a mesh of one process."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net(8, 8)
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (1,))))
    finally:
        dist.destroy_process_group()
    return model, adamw(model)


def with_gradients_and_state(change=lambda model: None):
    """A model in the middle of training."""
    model = net(8, 8, 8)
    optimizer = adamw(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    change(model)
    return model, optimizer


class OwnAdamW(torch.optim.AdamW):
    """A subclass may do anything in its step."""


def weird_parameter(dtype):
    def build():
        model = net(8, 8)
        model.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=dtype)))
        return model, adamw(model, foreach=False)

    return build


def foreign_half():
    model = net(8, 8)
    return model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2).half())])


MORE_REFUSED = [
    (dtensor, {}, ValueError, "'0.weight'.*DTensor"),
    (dtensor, {"opt_level": "O1"}, ValueError, "'0.weight'.*DTensor"),
    (meta, {"opt_level": "O1"}, ValueError, "'0.weight'.*meta.*plan"),
    (lazy, {"opt_level": "O1"}, ValueError, "not initialized.*forward"),
    (weird_parameter(torch.float64), {}, ValueError, "'odd'.*float64.*O1"),
    (weird_parameter(torch.complex64), {}, ValueError, "'odd'.*complex64.*O1"),
    (foreign_half, {}, ValueError, "not in the model.*float16"),
    (lambda: with_gradients_and_state(lambda m: setattr(m[1].bias, "data", m[1].bias.data.half())), {}, ValueError, "'1.bias'.*float16"),
    (with_gradients_and_state, {"opt_level": "O3"}, ValueError, "'O3'.*'O1', 'O2'"),
    (with_gradients_and_state, {"select": "everything"}, ValueError, "'everything'.*'all'"),
    (with_gradients_and_state, {"recipe": "currant"}, ValueError, "'currant'.*did you mean 'current'"),
    (with_gradients_and_state, {"backend": "te"}, RuntimeError, "not installed"),
    (with_gradients_and_state, {"config": {"backend": "te"}}, RuntimeError, "not installed"),
    (with_gradients_and_state, {"config": {"opt_levle": "O1"}}, ValueError, "'opt_levle'.*'opt_level'"),
    (with_gradients_and_state, {"config": 3}, TypeError, "config is a int"),
    (lambda: (m := net(8, 8), OwnAdamW(m.parameters())), {}, ValueError, "OwnAdamW.*exactly.*O1"),
    (lambda: (m := net(8, 8), [adamw(m), "adam"]), {}, TypeError, "optimizer is a str"),
    (lambda: (m := net(8, 8), {"main": adamw(m)}), {}, TypeError, "optimizer is a dict"),
    (lambda: (m := net(8, 8), torch.optim.lr_scheduler.StepLR(adamw(m), 1)), {}, TypeError, "optimizer is a StepLR.*torch.optim.Optimizer"),
    (lambda: ([m := net(8, 8)], adamw(m)), {}, TypeError, "model is a list"),
    (lambda: (m := net(8, 8), adamw(m, differentiable=True, foreach=False)), {}, ValueError, "differentiable.*O1"),
    (lambda: (m := net(8, 8), []), {}, ValueError, "optimizer"),
]


def whole(model, optimizer) -> list[torch.Tensor]:
    """Every tensor of both, copied: values, gradients, moments."""
    tensors = list(model.parameters()) + [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        tensors += [v for s in optimizer.state.values() for v in s.values()]
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("build,settings,error,message", MORE_REFUSED)
def test_refused_whole(build, settings, error, message):
    """Bit for bit as before, types, addresses and attributes included."""
    model, optimizer = build()
    single = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    comparable = isinstance(model, nn.Module) and build not in (lazy, meta, dtensor)
    before = (snapshot(model, single), whole(model, single), [dict(vars(m)) for m in model.modules()]) if comparable else None
    with pytest.raises(error, match=message):
        ampplug.initialize(model, optimizer, **settings)
    if before is not None:
        after = snapshot(model, single)
        assert before[0][0] == after[0] and [a[:2] for a in before[0][1]] == [a[:2] for a in after[1]]
        assert len(before[1]) == len(whole(model, single)) and all(torch.equal(a, b) for a, b in zip(before[1], whole(model, single)))
        assert [list(a) for a in before[2]] == [list(vars(m)) for m in model.modules()]
        assert single is None or type(single) is before[0][2][0] and "_low_bit" not in vars(single)
    if isinstance(model, nn.Module):
        assert not any(hasattr(m, "_ampplug") for m in model.modules())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_twice_is_refused_at_each_level_and_harms_nothing(level):
    model = net(32, 32)
    optimizer = adamw(model)
    ampplug.initialize(model, optimizer, level)
    model(torch.randn(4, 32)).sum().backward()
    before = whole(model, optimizer)
    for again in ((model, optimizer), (model, adamw(model)), (net(8, 8), optimizer), (nn.Sequential(model), adamw(model)), (net(8, 8), [optimizer])):
        for other in ("O1", "O2"):
            with pytest.raises(RuntimeError, match="already.*once"):
                ampplug.initialize(*again, other)
    assert all(torch.equal(a, b) for a, b in zip(before, whole(model, optimizer)))
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)


def test_without_an_optimizer_o1_still_converts():
    """Any optimizer made later works: its in-place updates are seen."""
    model = net(32, 32)
    assert ampplug.initialize(model, opt_level="O1") == (model, None)
    x = torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward()
        wanted = nn.functional.linear(x, model[0].weight, model[0].bias)
        assert 0.01 < (y - wanted).norm() / wanted.norm() < 0.06
        optimizer.step()
        assert (model(x) - y).norm() / y.norm() > 0.05


def test_several_models_and_optimizers():
    """Two models in one container, an optimizer for each, one shared foreign parameter: each steps its own."""
    models = nn.ModuleDict({"g": net(32, 32), "d": net(32, 16)})
    optimizers = (adamw(models["g"]), torch.optim.Adam(models["d"].parameters(), lr=1e-3))
    returned = ampplug.initialize(models, optimizers)
    assert returned[0] is models and returned[1] is optimizers
    x = torch.randn(8, 32)
    for step in range(3):
        for name, o, other in (("d", optimizers[1], "g"), ("g", optimizers[0], "d")):
            kept = [p.detach().clone() for p in models[other].parameters()]
            own = [p.detach().clone() for p in models[name].parameters()]
            for p in models.parameters():
                p.grad = None
            models["d"](models["g"](x)).square().mean().backward()
            o.step()
            assert all(torch.equal(a, b) for a, b in zip(kept, models[other].parameters()))
            assert all(not torch.equal(a, b) for a, b in zip(own, models[name].parameters()))
    # two calls for two models that share nothing
    a, b = net(16, 16), net(16, 16)
    for m in (a, b):
        ampplug.initialize(m, adamw(m))


def test_gradients_and_a_trained_optimizer_come_along():
    model, optimizer = with_gradients_and_state()
    grad, moment = model[0].weight.grad.clone(), optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    value = model[0].weight.detach().clone()
    ampplug.initialize(model, optimizer)
    assert torch.equal(model[0].weight.grad, grad.bfloat16()) and torch.equal(ampplug.fp32_state_dict(model)["0.weight"], value)
    state = ampplug.torch_state_dict(optimizer)["state"][0]
    assert state["step"] == 1 and (state["exp_avg_sq"] - moment).norm() / moment.norm() < 0.12
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"].item() == 2


@pytest.mark.parametrize(
    "build,settings,why",
    [
        (lambda: nn.Conv1d(4, 4, 1), {}, "no Linear layer"),
        (lambda: net(8, 8), {"select": lambda name, module: False}, "predicate"),
        (lambda: nn.ModuleDict({"lm_head": nn.Linear(8, 8)}), {}, "head.*select='all'"),
        (lambda: nn.MultiheadAttention(8, 2), {}, "NonDynamicallyQuantizableLinear"),
        (lambda: net(8, 8).double(), {"opt_level": "O1"}, "float64"),
    ],
)
def test_each_reason_for_converting_nothing(build, settings, why):
    model = build()
    with pytest.warns(UserWarning, match=f"no layer of the model computes in FP8.*{why}"):
        ampplug.initialize(model, adamw(model), **settings)


def test_pattern_that_matches_nothing():
    """expect: refused by name, whatever the others select; nothing is converted."""
    model = net(8, 8)
    with pytest.raises(ValueError, match=r"select: pattern 'layers.\*' matches none of the model's \d layers, such as '0'"):
        ampplug.initialize(model, adamw(model), select=["*", "layers.*"])
    assert type(model[0]) is nn.Linear
    with pytest.warns(UserWarning, match="no Linear layer"):  # where there is no layer, no name is wrong
        ampplug.initialize(model := nn.Conv1d(4, 4, 1), adamw(model), select=["layers.*"])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_transformers_train_and_evaluate(level, padded, dtype):
    """torch's fused inference and nested-tensor paths read weights behind the layers' backs; neither breaks nor bypasses FP8."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.ModuleDict({"e": nn.TransformerEncoder(layer, 2), "d": nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, dropout=0.0)}).to(dtype)
    reference = copy.deepcopy(model)
    optimizer = adamw(model, lr=2e-2)
    ampplug.initialize(model, optimizer, level)
    x = torch.randn(2, 6, 32, dtype=dtype)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    run = lambda m: m["d"](x, m["e"](x, src_key_padding_mask=mask if padded else None))  # noqa: E731
    seen = []
    model["e"].layers[1].linear2.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_nested))
    for mode in (True, False):
        model.train(mode), reference.train(mode)
        with torch.no_grad():
            y, z = run(model)[:, :4], run(reference)[:, :4]
        assert seen.pop() is False  # nested tensors would be multiplied in high precision
        assert 0.003 < (y - z).float().norm() / z.float().norm() < 0.10
    model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (run(model) - 3).float().square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert not p.grad.any() or not torch.equal(before[name], p), name


def test_fused_experts_stay_as_they_are():
    """Weights that a module multiplies by itself keep dtype and precision; they are stepped, and the plan says so."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.w = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 16) * 0.1)

        def forward(self, x):
            return torch.einsum("be,bi,eio->bo", self.router(x).softmax(-1), x, self.w)

    model = Experts()
    optimizer = adamw(model)
    plan = ampplug.plan(model, optimizer)
    entry = next(p for p in plan.parameters if p.name == "w")
    assert entry.after == torch.float32 and entry.becomes == "fp32 master" and not entry.fp8 and plan.converted == ("router",)
    ampplug.initialize(model, optimizer)
    assert model.w.dtype == torch.float32
    before = model.w.detach().clone()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    assert (model.w - before).abs().max().item() == pytest.approx(1e-2, rel=0.2)


def test_low_rank_adapters_on_a_frozen_base():
    """The frozen base computes in FP8 and stays; adapters learn from zero."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
            self.base.requires_grad_(False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model = Adapted()
    base = model.base.weight.detach().clone()
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for _ in range(4):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    assert torch.equal(model.base.weight, base) and model.base.weight.grad is None
    assert all(torch.isfinite(p).all() for p in model.parameters()) and model.b.weight.abs().max() > 1e-2


def test_emulation_warns_once(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    monkeypatch.setattr("ampplug.entry._warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model = net(8, 8)
            ampplug.initialize(model, adamw(model))
    assert [str(w.message) for w in seen if "emulated" in str(w.message)] and sum("emulated" in str(w.message) for w in seen) == 1


def test_use_te_false_is_native():
    model = net(8, 8)
    ampplug.initialize(model, adamw(model), use_te=False, backend="native")
    assert hasattr(model[0], "_ampplug")


def test_keywords_and_config_make_the_same_run():
    weights = []
    config = ampplug.Config(recipe="current", seed=3)
    ways = ({"recipe": "current", "seed": 3}, {"config": vars(config)}, {"config": config}, {"config": config, "opt_level": "O2"},
            {"config": {"recipe": "current"}, "seed": 3})  # fmt: skip
    for settings in ways:
        torch.manual_seed(0)
        model = net(32, 32)
        model, optimizer = ampplug.initialize(model, adamw(model), **settings)
        for _ in range(3):
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
        weights.append(ampplug.fp32_state_dict(model)["0.weight"])
        assert model[0]._ampplug.book is None and optimizer._low_bit.seed == 3
    assert all(torch.equal(weights[0], w) for w in weights[1:])


def test_layers_turn_back():
    """restore_layers, the inverse of the conversion. expect: classes, attributes and results of the plain model, which can be initialized again."""
    from ampplug.convert import restore_layers

    class Feed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((32, 64), (32, 64), (64, 32)))

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    model = nn.Sequential(nn.Linear(32, 32), Feed())
    before = [(type(m), set(vars(m))) for m in model.modules()]
    x = torch.randn(16, 32)
    y = model(x)
    for _ in range(2):
        ampplug.initialize(model, None, "O1", fuse=True)
        assert not torch.equal(model(x), y) and type(model[1]) is not Feed
        restore_layers(model)
        assert torch.equal(model(x), y) and [(type(m), set(vars(m))) for m in model.modules()] == before


def test_trainable_parameters_without_an_optimizer_are_told(caplog):
    model = net(8, 8, 8)
    ampplug.initialize(model, adamw(model[0]))
    assert "2 trainable parameters ('1.weight', ...) are in no optimizer" in caplog.text
