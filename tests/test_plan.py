"""The Plan: what every Linear and every parameter becomes, why, and at what cost. It decides without touching, and `initialize` keeps to it."""

import dataclasses
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import ampplug
from ampplug.planning import HEAD_NAMES, SMALLEST_DIMENSION, SMALLEST_WEIGHT


class Toy(nn.Module):
    """One of each kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.body = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32, bias=False))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.attention = nn.MultiheadAttention(32, 4)
        self.experts = nn.Parameter(torch.zeros(2, 32, 32))
        self.lm_head = nn.Linear(32, 16, bias=False)
        self.lm_head.weight = self.embedding.weight


def stepped(model: nn.Module, **settings) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **settings)


def entry(plan: ampplug.Plan, name: str):
    return next(p for p in plan.parameters if p.name == name)


def layer(plan: ampplug.Plan, name: str):
    return next(x for x in plan.layers if x.name == name)


def test_every_layer_and_parameter_once_with_a_reason():
    model = Toy()
    plan = ampplug.plan(model, stepped(model))
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert [x.name for x in plan.layers] == linears and all(x.why for x in plan.layers) and all(p.why for p in plan.parameters)
    assert [p.name for p in plan.parameters] == [n for n, _ in model.named_parameters()]  # a tied weight counts once
    assert set(plan.converted) == {"body.0", "body.2", "frozen"}
    assert "head" in layer(plan, "lm_head").why and "subclass" in layer(plan, "attention.out_proj").why
    assert layer(plan, "body.0").shape == (48, 32)


def test_what_becomes_of_each_parameter():
    model = Toy()
    plan = ampplug.plan(model, stepped(model))
    fp32, bf16 = torch.float32, torch.bfloat16
    for name, after, becomes, fp8 in (
        ("body.0.weight", bf16, "split master", True),
        ("body.0.bias", fp32, "fp32 master", False),
        ("body.1.weight", fp32, "fp32 master", False),
        ("frozen.weight", fp32, "as it is", True),
        ("frozen.bias", fp32, "as it is", False),
        ("attention.in_proj_weight", fp32, "fp32 master", False),
        ("attention.out_proj.weight", fp32, "fp32 master", False),
        ("experts", fp32, "fp32 master", False),
        ("embedding.weight", fp32, "fp32 master", False),
    ):
        p = entry(plan, name)
        assert (p.after, p.becomes, p.fp8) == (after, becomes, fp8), name
    assert "frozen" in entry(plan, "frozen.weight").why
    listed = entry(ampplug.plan(model, torch.optim.AdamW(model.parameters())), "frozen.weight")
    assert listed.after == fp32 and listed.becomes == "as it is"  # in the optimizer, but frozen: not even rounded
    everything = ampplug.plan(model, stepped(model), select="all")
    tied = entry(everything, "embedding.weight")
    assert tied.fp8 and tied.after == fp32 and "also read by embedding" in tied.why
    outside = ampplug.plan(model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))]))
    assert entry(outside, "(not in the model)").becomes == "fp32 master"
    partly = ampplug.plan(model, torch.optim.AdamW(model.body[0].parameters()))
    assert entry(partly, "body.2.weight").becomes == "as it is" and "not in the optimizer" in entry(partly, "body.2.weight").why


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("select", ["auto", "all", ["body.0"]])
def test_initialize_keeps_to_it(level, select):
    model = Toy()
    optimizer = stepped(model)
    plan = ampplug.plan(model, optimizer, level, select=select)
    untouched = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    assert all(type(m).__module__.startswith("torch") or isinstance(m, Toy) for m in model.modules())
    ampplug.initialize(model, optimizer, level, select=select)
    converted = {n for n, m in model.named_modules() if getattr(m, "_ampplug", None) is not None}
    assert converted == (set() if level == "O0" else set(plan.converted))
    for p in plan.parameters:
        now = model.get_parameter(p.name)
        assert now.dtype == p.after and untouched[p.name][1] == p.before
        if level != "O2" or p.becomes == "as it is":
            assert (now.data_ptr(), now.dtype) == untouched[p.name]


def test_bytes_are_those_of_the_storage():
    """Parameter, remainder, moments, FP8 copies and gradient: the sum over the real tensors, per element, within one percent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = ampplug.plan(model, optimizer)
    ampplug.initialize(model, optimizer)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    elements = sum(p.numel() for p in model.parameters())
    real = {
        "parameter": sum(p.nbytes for p in model.parameters()),
        "gradient": sum(p.grad.nbytes for p in model.parameters()),
        "FP8 copies": sum(w.w8.nbytes + w.w8t.nbytes for w in model[0]._ampplug.bank.weights),
        "moments": sum(s[k].nbytes for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq", "exp_avg_sq_top")),
        "remainder": sum(s["master_low"].nbytes for s in optimizer.state.values() if "master_low" in s),
    }
    kinds = plan.bytes_per_parameter()
    for kind, size in real.items():
        assert kinds[kind] == pytest.approx(size / elements, rel=0.01), kind
    assert kinds["total"] == pytest.approx(sum(real.values()) / elements, rel=0.01) and kinds["total"] <= 10.1 and kinds["before"] == 16.0


def test_bytes_of_other_levels_and_dtypes():
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    bf16 = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    o1 = ampplug.plan(model, None, "O1").bytes_per_parameter()
    assert o1["total"] == 4 + 4 + 2 and "moments" not in o1
    assert ampplug.plan(model, None, "O0").bytes_per_parameter()["before"] == 16
    assert ampplug.plan(bf16).bytes_per_parameter()["total"] == pytest.approx(2 + 2 + 2 + 2 + 2 + 1 / 128)


def test_meta_models_are_planned_and_not_changed():
    with torch.device("meta"):
        model = Toy()
    plan = ampplug.plan(model)
    assert set(plan.converted) == {"body.0", "body.2", "frozen"} and all(p.is_meta for p in model.parameters())
    real = Toy()
    assert plan.converted == ampplug.plan(real).converted


def test_rules_of_a_gpu(monkeypatch):
    """Below the sizes that pay, a Linear stays as it is, unless asked for."""
    monkeypatch.setattr("ampplug.planning.on_gpu", lambda device: True)
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "narrow": nn.Linear(SMALLEST_DIMENSION - 16, 8192),
                "small": nn.Linear(SMALLEST_DIMENSION, SMALLEST_DIMENSION),
                "large": nn.Linear(SMALLEST_WEIGHT // SMALLEST_DIMENSION, SMALLEST_DIMENSION),
            }
        )
    plan = ampplug.plan(model)
    assert plan.converted == ("large",) and "too small" in layer(plan, "narrow").why and "select='all'" in layer(plan, "small").why
    assert len(ampplug.plan(model, select="all").converted) == 3


def test_planned_here_for_a_gpu_elsewhere():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4096, 4096))
    for device, converted in (("cuda", ("1",)), ("cpu", ("0", "1")), (None, ("0", "1"))):
        plan = ampplug.plan(model, device=device)
        assert plan.converted == converted and f"for {(device or 'cpu').upper()}:" in str(plan)


def test_a_dry_run_says_would():
    model = Toy()
    text = str(ampplug.plan(model, opt_level="O0"))
    assert "level O0 (nothing is changed)" in text and "layers would be in FP8" in text and "would become" in text
    assert "FP8 copies" not in text and "master" not in text


@pytest.mark.parametrize(
    "model,optimizer,message",
    [
        (nn.Linear(8, 8).half(), None, "float16"),
        (nn.Linear(8, 8).double(), None, "float64"),
        (nn.Linear(8, 8), lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (nn.Linear(8, 8), lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (nn.Linear(8, 8), lambda p: torch.optim.AdamW([nn.Parameter(torch.zeros(2))]), "none of them the model's"),
    ],
)
def test_no_plan_for_what_initialize_refuses(model, optimizer, message):
    made = None if optimizer is None else optimizer(model.parameters())
    with pytest.raises(ValueError, match=message):
        ampplug.plan(model, made)
    if made is not None:
        with pytest.raises(ValueError, match=message):
            ampplug.initialize(model, made)
    assert type(model) is nn.Linear


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_heads_are_left_by_default(name):
    model = nn.ModuleDict({name: nn.Linear(8, 8), "x": nn.Linear(8, 8)})
    assert ampplug.plan(model).converted == ("x",)
    assert ampplug.plan(model, select="all").converted == (name, "x")
    assert ampplug.plan(nn.ModuleDict({"model": model})).converted == ("model.x",)


def test_patterns_and_predicates():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    assert ampplug.plan(model, select=["1?"]).converted == ("10", "11")
    assert ampplug.plan(model, select=["0", "[45]"]).converted == ("0", "4", "5")
    asked = []
    assert ampplug.plan(model, select=lambda name, module: asked.append((name, module)) or name == "3").converted == ("3",)
    assert [m for _, m in asked] == list(model) and "'[45]'" in layer(ampplug.plan(model, select=["[45]"]), "4").why


def test_conv1d_is_known_by_name():
    made = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    made.weight, made.bias = nn.Parameter(torch.zeros(8, 24)), nn.Parameter(torch.zeros(24))
    plan = ampplug.plan(nn.Sequential(made))
    assert plan.converted == ("0",) and layer(plan, "0").kind == "Conv1D" and layer(plan, "0").shape == (8, 24)
    made.__class__ = type("Conv1D", (nn.Module,), {"__module__": "elsewhere"})
    assert ampplug.plan(nn.Sequential(made)).layers == ()


def test_subclasses_and_odd_weights_stay():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    empty = nn.Linear(8, 8)
    empty.weight = nn.Parameter(torch.zeros(0, 8))
    plan = ampplug.plan(nn.ModuleDict({"own": Own(8, 8), "empty": empty, "fp64": nn.Linear(8, 8).double()}), select="all", opt_level="O1")
    assert plan.converted == () and "Own" in layer(plan, "own").why and "non-empty" in layer(plan, "empty").why and "float64" in layer(plan, "fp64").why


def test_it_is_immutable_and_prints_a_table():
    model = Toy()
    plan = ampplug.plan(model, stepped(model), recipe="current")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.layers = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.parameters[0].after = torch.float16
    lines = str(plan).splitlines()
    assert lines[0] == f"ampplug plan: level O2, recipe current, for CPU: 3 of {len(plan.layers)} layers in FP8"
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert "48x32" in rows["body.0"] and "FP8" in rows["body.0"] and "as it is" in rows["lm_head"]
    assert "fp32 -> bf16" in rows["body.0.weight"] and "10.01" in rows["body.0.weight"] and "2x32x32" in rows["experts"]
    assert lines[-1].startswith("bytes per parameter: ") and "16.00" in lines[-1]
    assert {p.name for p in plan.parameters} <= set(rows)


def test_command(capsys, monkeypatch, tmp_path):
    """`ampplug plan`: a preset, or module:callable on the meta device; mistakes are told in one line."""
    from ampplug.cli import main

    assert main(["plan", "--preset", "small"]) == 0
    assert "layers in FP8" in capsys.readouterr().out
    mine = types.ModuleType("mine_for_plan")
    mine.build, mine.wrong, mine.number = Toy, lambda: 3, 7
    monkeypatch.setitem(sys.modules, "mine_for_plan", mine)
    assert main(["plan", "mine_for_plan:build", "--opt-level", "O1", "--select", "body.*"]) == 0
    out = capsys.readouterr().out
    assert "level O1" in out and "2 of" in out and "selected by 'body.*'" in out
    for bad, words in (("mine_for_plan:nothing", "no callable"), ("mine_for_plan:number", "no callable"), ("mine_for_plan:wrong", "returned a int"), ("nowhere_at_all:x", "cannot import"), ("plain", "module:callable")):
        assert main(["plan", bad]) == 2
        err = capsys.readouterr().err
        assert err.startswith("ampplug: error: ") and words in err and len(err.splitlines()) == 1
    assert main(["plan"]) == 2 and main(["plan", "--preset", "huge"]) == 2


def test_command_of_the_package():
    run = subprocess.run([sys.executable, "-m", "ampplug", "plan", "--preset", "small"], capture_output=True, text=True)
    assert run.returncode == 0 and "bytes per parameter" in run.stdout, run.stderr
