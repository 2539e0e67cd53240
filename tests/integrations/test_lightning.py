"""Lightning's Trainer and Fabric with the real packages on CPU: the same numbers as a loop by hand, exact resume, clear refusals."""

import importlib
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import ampplug

pytest.importorskip("lightning")

PACKAGES = [("lightning.pytorch", "lightning_pytorch"), ("pytorch_lightning", "pytorch_lightning")]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
]


@pytest.fixture(params=PACKAGES, ids=lambda p: p[0])
def package(request):
    """(the Trainer's package, ampplug's classes for it)."""
    pytest.importorskip(request.param[0])
    return load(*request.param)


def load(name: str = "lightning.pytorch", module: str = "lightning_pytorch"):
    return importlib.import_module(name), importlib.import_module(f"ampplug.integrations.{module}")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 32))


def batches(n: int, rank: int = 0) -> list[torch.Tensor]:
    return [torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * rank + i)) * 3.0**rank for i in range(n)]


def loader(n: int, rank: int = 0):
    return torch.utils.data.DataLoader(torch.cat(batches(n, rank)), batch_size=8)


class Resumable:
    """An iterable of `batches` that goes on where its checkpoint was made, which torch's DataLoader cannot."""

    def __init__(self, n: int, rank: int = 0):
        self.data, self.position, self.resumed = batches(n, rank), 0, False

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        self.position, self.resumed = self.position if self.resumed else 0, False
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]

    def state_dict(self):
        return {"position": self.position % len(self.data)}

    def load_state_dict(self, state):
        self.position, self.resumed = state["position"], True


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x).float().square().mean()


def make_module(pl, *, manual: bool = False, clip: float | None = None, optimizer=torch.optim.AdamW, seed: int = 0, scheduled: bool = True):
    """A LightningModule whose layers are made in configure_model; `losses` records every micro-batch."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual
            self.losses = []
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = network(seed)

        def configure_optimizers(self):
            o = optimizer(self.parameters(), lr=1e-2)
            if not scheduled:
                return o
            return {"optimizer": o, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 3, 0.8), "interval": "step"}}

        def training_step(self, x, i):
            loss = loss_of(self.net, x)
            self.losses.append(loss.detach())
            if manual:
                o = self.optimizers()
                o.zero_grad(set_to_none=bool(i % 2))
                self.manual_backward(loss)
                if clip is not None:
                    self.clip_gradients(o, gradient_clip_val=clip, gradient_clip_algorithm="norm")
                o.step()
                if scheduled:
                    self.lr_schedulers().step()
            return loss

        def validation_step(self, x, i):
            self.log("v", loss_of(self.net, x))

        test_step = validation_step

        def predict_step(self, x, i):
            return self.net(x)

    return Module()


def make_trainer(pl, steps: int, strategy="ampplug", **settings):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(**{"max_steps": steps, "max_epochs": -1, "accelerator": "cpu", "devices": 1, "strategy": strategy, **quiet, **settings})


def by_hand(steps: int, level: str, *, precision: str = "32-true", accumulate: int = 1, clip=None, fabric: bool = False):
    """Plain `ampplug.initialize` and a loop. Returns (losses, network, optimizer)."""
    if precision == "bf16-true" and not fabric:  # the Trainer makes the layers in this dtype, Fabric casts them
        torch.set_default_dtype(torch.bfloat16)
    net = network()
    torch.set_default_dtype(torch.float32)
    if precision == "bf16-true":
        net.bfloat16()
    o = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(o, 3, 0.8)
    net, o = ampplug.initialize(net, o, level)
    losses = []
    for t, x in enumerate(batches(steps * accumulate)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            if not fabric:
                loss = loss_of(net, x.bfloat16() if precision == "bf16-true" else x)
            else:  # inputs are cast on the way in, outputs on the way out
                y = net(x if precision == "32-true" else x.bfloat16()).float()
        if fabric:
            loss = (y - x).square().mean()
        losses.append(loss.detach())
        (loss / accumulate).backward()
        if (t + 1) % accumulate == 0:
            if clip is not None:
                clip(net.parameters())
            o.step()
            schedule.step()
            o.zero_grad()
    return losses, net, o


def everything(net: nn.Module, optimizer) -> torch.Tensor:
    """All that training depends on, as one vector of bytes."""
    state = net[0]._ampplug
    parts = [p.detach() for p in net.parameters()] + [state.bank.scale, state.bank.amax, state.book.scale, state.book.history, state.book.position]
    parts += [w.w8 for w in state.bank.weights] + [w.w8t for w in state.bank.weights]
    parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    parts += [torch.tensor(g["lr"]) for g in optimizer.param_groups]
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def plain_optimizer(trainer):
    return trainer.optimizers[0]


# ---------------------------------------------------------------- the same numbers as by hand


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("form", ["strategy", "plugin"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_same_as_by_hand(package, level, form, precision):
    """20 steps. expect: every loss and the final state bit for bit those of `initialize` and a loop."""
    pl, own = package
    if form == "strategy":
        trainer = make_trainer(pl, 20, own.AmpPlugStrategy(opt_level=level), precision=precision)
    else:
        trainer = make_trainer(pl, 20, "auto", plugins=[own.AmpPlugPrecision(level, precision=precision)])
    module = make_module(pl)
    trainer.fit(module, loader(20))
    losses, net, o = by_hand(20, level, precision=precision)
    assert torch.equal(torch.stack(module.losses), torch.stack(losses))
    assert torch.equal(everything(module.net, plain_optimizer(trainer)), everything(net, o))
    assert losses[-1] < losses[0] and type(module.net[0]) is type(net[0]) is not nn.Linear


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clip_by_norm(package, level, manual):
    """expect: as `ampplug.clip_grad_norm_` by hand, which differs from not clipping."""
    pl, own = package
    module = make_module(pl, manual=manual, clip=0.05)
    trainer = make_trainer(pl, 8, own.AmpPlugStrategy(level), **({} if manual else {"gradient_clip_val": 0.05}))
    trainer.fit(module, loader(8))
    _, net, o = by_hand(8, level, clip=lambda p: ampplug.clip_grad_norm_(p, 0.05))
    assert torch.equal(everything(module.net, plain_optimizer(trainer)), everything(net, o))
    assert not torch.equal(everything(net, o), everything(*by_hand(8, level)[1:]))


def test_clip_by_value(package):
    """expect: as torch's by hand."""
    pl, own = package
    module, trainer = make_module(pl), make_trainer(pl, 8, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    trainer.fit(module, loader(8))
    _, net, o = by_hand(8, "O2", clip=lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3))
    assert torch.equal(everything(module.net, plain_optimizer(trainer)), everything(net, o))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clip_has_the_norm(package, level):
    """One step. expect: what reached the optimizer (SGD's update at O1, the first moment at O2) has the norm 0.05."""
    pl, own = package
    module = make_module(pl, optimizer=torch.optim.SGD if level == "O1" else torch.optim.AdamW, scheduled=False)
    trainer = make_trainer(pl, 1, own.AmpPlugStrategy(level), gradient_clip_val=0.05)
    trainer.fit(module, loader(1))
    if level == "O1":
        parts = [(a - b).flatten() / 1e-2 for a, b in zip(module.net.parameters(), network().parameters(), strict=True)]
    else:
        parts = [s["exp_avg"].flatten() / 0.1 for s in ampplug.torch_state_dict(plain_optimizer(trainer))["state"].values()]
    assert abs(torch.cat(parts).norm().item() / 0.05 - 1) < 0.02


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation(package, level):
    """4 steps of 3 micro-batches. expect: as by hand."""
    pl, own = package
    module, trainer = make_module(pl), make_trainer(pl, 4, own.AmpPlugStrategy(level), accumulate_grad_batches=3)
    trainer.fit(module, loader(12))
    _, net, o = by_hand(4, level, accumulate=3)
    assert torch.equal(everything(module.net, plain_optimizer(trainer)), everything(net, o))


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("form", ["automatic", "manual", "accumulation", "end of epoch", "plugin"])
def test_resume_is_exact(package, form, level, tmp_path):
    """20 steps against 10 and 10 resumed in new objects. expect: weights, moments, scales and later losses differ by exactly 0."""
    pl, own = package

    def run(steps, ckpt=None, seed=0):
        module = make_module(pl, manual=form == "manual", clip=0.05, seed=seed)
        every = {"every_n_epochs": 1} if form == "end of epoch" else {"every_n_train_steps": 10}
        save = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **every)
        accumulate = 2 if form == "accumulation" else 1
        settings = {} if form == "manual" else {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
        settings.update(enable_checkpointing=True, callbacks=[save], default_root_dir=tmp_path)
        if form == "plugin":
            trainer = make_trainer(pl, steps, "auto", plugins=[own.AmpPlugPrecision(level)], **settings)
        else:
            trainer = make_trainer(pl, steps, own.AmpPlugStrategy(level), **settings)
        data = Resumable(10 if form == "end of epoch" else 20 * accumulate)
        trainer.fit(module, data, loader(2), ckpt_path=ckpt)
        return module, everything(module.net, plain_optimizer(trainer))

    straight, wanted = run(20)
    (tmp_path / "step=20.ckpt").unlink()
    resumed, found = run(20, tmp_path / "step=10.ckpt", seed=1)
    half = len(straight.losses) // 2
    assert len(resumed.losses) == half
    assert (torch.stack(resumed.losses) - torch.stack(straight.losses[half:])).abs().max().item() == 0.0
    assert torch.equal(found, wanted)


def test_checkpoint_is_plain(tmp_path):
    """expect: weights under the keys and in the shapes of the plain module; all of it loads with weights_only."""
    pl, own = load()
    module, trainer = make_module(pl), make_trainer(pl, 3)
    trainer.fit(module, loader(3))
    trainer.save_checkpoint(tmp_path / "c.ckpt", weights_only=False)
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    plain = nn.ModuleDict({"net": network(1)})
    plain.load_state_dict(saved["state_dict"])
    assert torch.equal(plain["net"][0].weight, module.net[0].weight.float()) and len(saved["optimizer_states"][0]["ampplug"]["book"]["slots"]) == 4


# ---------------------------------------------------------------- the life of a module


def test_layers_of_configure_model():
    """Layers that exist only from configure_model on. expect: FP8 rounding is visible; the weights moved, and W8 followed them."""
    pl, own = load()
    module, trainer = make_module(pl), make_trainer(pl, 3)
    outputs = []
    x = batches(1)[0]

    class Look(pl.Callback):
        def on_train_batch_end(self, *_):
            outputs.append(module.net(x).detach())

    trainer.callbacks.append(Look())
    trainer.fit(module, loader(3))
    first = module.net[0].train()
    y, wanted = first(x), F.linear(x, first.weight.float(), first.bias.float())
    assert 1e-3 < ((y - wanted).norm() / wanted.norm()).item() < 0.1
    assert (first.weight.float() - network()[0].weight).abs().max() > 1e-3
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(outputs, outputs[1:], strict=False))
    w = first._ampplug.weight
    assert ((w.own_w8.float() * w.scale_inv - first.weight).norm() / first.weight.norm()).item() < 0.04


def test_evaluation(tmp_path):
    """validate, test, predict after fit, and from a checkpoint in new objects. expect: the same bits; evaluation changes nothing."""
    pl, own = load()
    module, trainer = make_module(pl), make_trainer(pl, 5)
    trainer.fit(module, loader(5))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    state = everything(module.net, plain_optimizer(trainer))
    value = trainer.validate(module, loader(2), verbose=False)
    assert trainer.test(module, loader(2), verbose=False) == value
    y = torch.cat(trainer.predict(module, loader(2)))
    assert torch.equal(state, everything(module.net, plain_optimizer(trainer)))
    again = make_module(pl, seed=1)
    fresh = make_trainer(pl, 5)
    assert fresh.validate(again, loader(2), ckpt_path=tmp_path / "c.ckpt", verbose=False) == value
    assert torch.equal(torch.cat(fresh.predict(again, loader(2))), y)
    fresh.fit(again, loader(5), ckpt_path=tmp_path / "c.ckpt")  # after evaluation alone, which converted without an optimizer


@pytest.mark.parametrize("same_trainer", [False, True])
def test_fit_twice(same_trainer):
    """A second fit of the same module. expect: it starts from the exact fp32 weights of the first, with a new optimizer, in FP8 again."""
    pl, own = load()
    module, trainer = make_module(pl), make_trainer(pl, 4)
    trainer.fit(module, loader(4))
    values = ampplug.fp32_state_dict(module.net)
    assert any((v != v.bfloat16().float()).any() for v in values.values())
    net = network()
    net.load_state_dict(values)
    o = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(o, 3, 0.8)
    ampplug.initialize(net, o)
    for x in batches(4):
        loss_of(net, x).backward()
        o.step()
        schedule.step()
        o.zero_grad()
    if same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 8
    else:
        trainer = make_trainer(pl, 4)
    trainer.fit(module, loader(4))
    assert torch.equal(everything(module.net, plain_optimizer(trainer)), everything(net, o))


def test_schedule_and_monitor(package, tmp_path):
    """LearningRateMonitor with a stepwise schedule. expect: the schedule's values, and no warning about step order or an overridden step."""
    pl, own = package
    callbacks, loggers = (importlib.import_module(f"{pl.__name__}.{name}") for name in ("callbacks", "loggers"))
    monitor = callbacks.LearningRateMonitor("step")
    trainer = make_trainer(pl, 7, callbacks=[monitor], logger=loggers.CSVLogger(tmp_path), log_every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_module(pl), loader(7))
    assert not [str(w.message) for w in caught if "lr_scheduler" in str(w.message) or "overridden" in str(w.message)]
    assert list(monitor.lrs) == ["lr-AdamW"] and abs(plain_optimizer(trainer).param_groups[0]["lr"] - 1e-2 * 0.8**2) < 1e-9


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers(package, level):
    """Manual optimization that toggles between two (any at O1; AdamW at O2). expect: bit for bit as by hand."""
    pl, own = package
    first = torch.optim.SGD if level == "O1" else torch.optim.AdamW

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = network()

        def configure_optimizers(self):
            return first(self.net[0].parameters(), lr=1e-2), torch.optim.AdamW(self.net[3].parameters(), lr=1e-2)

        def training_step(self, x, i):
            o = self.optimizers()[i % 2]
            self.toggle_optimizer(o)
            self.manual_backward(loss_of(self.net, x))
            o.step()
            o.zero_grad()
            self.untoggle_optimizer(o)

    module, trainer = Module(), make_trainer(pl, 6, own.AmpPlugStrategy(level))
    trainer.fit(module, loader(6))
    net = network()
    optimizers = [first(net[0].parameters(), lr=1e-2), torch.optim.AdamW(net[3].parameters(), lr=1e-2)]
    ampplug.initialize(net, optimizers, level)
    for i, x in enumerate(batches(6)):
        for o, layer in zip(optimizers, (net[0], net[3]), strict=True):
            for p in layer.parameters():
                p.requires_grad_(o is optimizers[i % 2])
        loss_of(net, x).backward()
        optimizers[i % 2].step()
        optimizers[i % 2].zero_grad()
    for mine, wanted in zip(trainer.optimizers, optimizers, strict=True):
        assert torch.equal(everything(module.net, mine), everything(net, wanted))
    assert not torch.equal(net[0].weight.float(), network()[0].weight) and not torch.equal(net[3].weight.float(), network()[3].weight)


# ---------------------------------------------------------------- refusals


def test_names_and_registration(package):
    """expect: strategy "ampplug" is the class for this package, takes all settings, and survives being sent to another process."""
    pl, own = package
    assert type(make_trainer(pl, 1).strategy) is own.AmpPlugStrategy
    strategy = own.AmpPlugStrategy("O1", recipe="current", select="all", history=4, find_unused_parameters=True)
    assert (strategy.config.recipe, strategy.config.history) == ("current", 4)
    assert pickle.loads(pickle.dumps(strategy)).config == strategy.config
    from ampplug.integrations import lightning

    assert issubclass(lightning.AmpPlugStrategy, load()[0].strategies.DDPStrategy)


def test_refusals(package):
    """expect: errors that name the argument, what was found and what is legal."""
    pl, own = package
    for precision in ("64-true", "16-true"):
        with pytest.raises(ValueError, match=f"precision='{precision}' .a .*; with ampplug legal are '32-true', 'bf16-mixed', 'bf16-true'"):
            make_trainer(pl, 1, precision=precision)
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        own.AmpPlugPrecision(precision="16-mixed")
    for kind in (own.AmpPlugStrategy, own.AmpPlugPrecision, own.AmpPlugFabricStrategy):
        with pytest.raises(ValueError, match="opt_level='O3' is not legal; legal values are 'O0', 'O1', 'O2'|opt_level='O3'"):
            kind(opt_level="O3")
        with pytest.raises(ValueError, match="unknown argument 'optlevel'; legal are opt_level, backend"):
            kind(optlevel="O1")
    with pytest.raises(ValueError, match="AmpPlugPrecision beside strategy='ampplug'"):
        make_trainer(pl, 1, plugins=[own.AmpPlugPrecision()])
    sharded = importlib.import_module(f"{pl.__name__}.strategies").ModelParallelStrategy()
    trainer = make_trainer(pl, 1)
    module = make_module(pl)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._accelerator_connector.strategy = sharded
    with pytest.raises(ValueError, match="strategy is a ModelParallelStrategy; AmpPlugPrecision works with .*FSDP2"):
        own.AmpPlugPrecision().convert_module(module)


def test_level_0(package):
    """expect: nothing is changed."""
    pl, own = package
    module, trainer = make_module(pl), make_trainer(pl, 2, own.AmpPlugStrategy("O0"), gradient_clip_val=0.05)
    trainer.fit(module, loader(2))
    trainer.validate(module, loader(1), verbose=False)
    assert type(module.net[0]) is nn.Linear and type(plain_optimizer(trainer)) is torch.optim.AdamW


# ---------------------------------------------------------------- Fabric


def make_fabric(package=PACKAGES[0], strategy="ampplug", devices=1, **settings):
    pl, own = load(*package)
    kind = importlib.import_module("lightning.fabric" if package[0] == "lightning.pytorch" else "lightning_fabric").Fabric
    fabric = kind(accelerator="cpu", devices=devices, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def run_fabric(fabric, steps, *, clip=None, accumulate=1, path=None, seed=0, rank=0):
    """(losses, network, optimizer, wrapped model); steps: a range. Resumes from `path` if steps do not begin at 0, else saves there at the end."""
    net = network(seed)
    o = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(o, 3, 0.8)
    model, optimizer = fabric.setup(net, o)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if path is not None and steps[0]:
        fabric.load(path, state)
    losses = []
    data = batches(accumulate * (steps[-1] + 1), rank)
    for t in steps:
        for i in range(accumulate):
            with fabric.no_backward_sync(model, enabled=i + 1 < accumulate):
                loss = loss_of(model, data[t * accumulate + i])
                losses.append(loss.detach())
                fabric.backward(loss / accumulate)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if path is not None and not steps[0]:
        fabric.save(path, state)
    return losses, net, o


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_same_as_by_hand(package, level, precision):
    """expect: every loss and the final state bit for bit."""
    pl, own = package
    name = next(p for p in PACKAGES if p[0] == pl.__name__)
    losses, net, o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level), precision=precision), range(10), accumulate=2)
    wanted, plain, plain_o = by_hand(10, level, precision=precision, accumulate=2, fabric=True)
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    assert torch.equal(everything(net, o), everything(plain, plain_o))
    assert losses[-1] < losses[0] and type(net[0]) is not nn.Linear and net[0].weight.dtype == plain[0].weight.dtype


def test_fabric_clips():
    for arguments, reference in (
        ({"max_norm": 0.05}, lambda p: ampplug.clip_grad_norm_(p, 0.05)),
        ({"max_norm": 0.05, "error_if_nonfinite": False}, lambda p: ampplug.clip_grad_norm_(p, 0.05)),
        ({"clip_val": 1e-3}, lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3)),
    ):
        _, net, o = run_fabric(make_fabric(), range(6), clip=arguments)
        assert torch.equal(everything(net, o), everything(*by_hand(6, "O2", clip=reference)[1:]))


def test_fabric_norm_that_is_not_finite():
    """expect: an error, or on request a step that changes nothing."""
    fabric = make_fabric()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(loss_of(model, batches(1)[0]) * float("nan"))
    with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    before = net[0].weight.clone()
    assert not fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isfinite()
    optimizer.step()
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fabric_resume_is_exact(package, level, tmp_path):
    pl, own = package
    name = next(p for p in PACKAGES if p[0] == pl.__name__)
    wanted, net, o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(20))
    run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(10), path=tmp_path / "c")
    found, again, again_o = run_fabric(make_fabric(name, own.AmpPlugFabricStrategy(level)), range(10, 20), path=tmp_path / "c", seed=1)
    assert (torch.stack(found) - torch.stack(wanted[10:])).abs().max().item() == 0.0
    assert torch.equal(everything(again, again_o), everything(net, o))


def test_fabric_refusals():
    fabric = make_fabric()
    with pytest.raises(RuntimeError, match="call fabric.setup.model, optimizer."):
        fabric.setup_optimizers(torch.optim.AdamW(fabric.setup_module(network()).parameters()))
    with pytest.raises(ValueError, match="precision='64-true' .a DoublePrecision.; with ampplug legal are"):
        make_fabric(precision="64-true")
    with pytest.raises(TypeError, match="AmpPlugPrecision is for the Trainer"):
        make_fabric(strategy="auto", plugins=[load()[1].AmpPlugPrecision()]).setup(network())


# ---------------------------------------------------------------- two processes


def agree(value: torch.Tensor) -> bool:
    gathered = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(gathered, value)
    return torch.equal(*gathered)


def check_trainer(rank, package, level, path, accumulate=1, manual=False):
    """20 steps against 10 and 10 resumed, data ten times as large on one rank. Ranks agree bit for bit; they begin with different weights."""
    pl, own = load(*package)

    def run(ckpt=None):
        save = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(path, "{step}", save_top_k=-1, every_n_train_steps=10)
        settings = {} if manual else {"gradient_clip_val": 0.05, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(
            pl, 20, own.AmpPlugStrategy(level), devices=2, enable_checkpointing=True, callbacks=[save], use_distributed_sampler=False, **settings
        )
        module = make_module(pl, manual=manual, clip=0.05, seed=rank)
        trainer.fit(module, Resumable(20 * accumulate, rank), ckpt_path=ckpt)
        return module, everything(module.net, plain_optimizer(trainer))

    straight, wanted = run()
    assert agree(wanted) and not agree(straight.losses[0].reshape(1))
    if rank == 0:
        os.remove(f"{path}/step=20.ckpt")
    dist.barrier()
    resumed, found = run(f"{path}/step=10.ckpt")
    assert torch.equal(found, wanted)
    assert (torch.stack(resumed.losses) - torch.stack(straight.losses[10 * accumulate :])).abs().max().item() == 0.0
    return wanted


def check_same_as_ddp_by_hand(rank, wanted):
    """The Trainer's 20 steps are those of initialize, DDP and a loop."""
    net = network(rank)
    o = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(o, 3, 0.8)
    ampplug.initialize(net, o)
    model = nn.parallel.DistributedDataParallel(net)
    for x in batches(20, rank):
        loss_of(model, x).backward()
        ampplug.clip_grad_norm_(net.parameters(), 0.05)
        o.step()
        schedule.step()
        o.zero_grad()
    assert torch.equal(everything(net, o), wanted)


def check_plugin(rank):
    """The plugin under Lightning's own DDP: O1 and bf16-true train; O2 with an fp32 model names the ways out, and changes nothing."""
    pl, own = load()
    for plugin in (own.AmpPlugPrecision("O1"), own.AmpPlugPrecision(precision="bf16-true")):
        trainer = make_trainer(pl, 3, "ddp", devices=2, plugins=[plugin], use_distributed_sampler=False)
        module = make_module(pl, seed=rank)
        trainer.fit(module, loader(3, rank))
        assert agree(everything(module.net, plain_optimizer(trainer)))
        assert module.net[0]._ampplug.book.names[0] == "net.0.x"  # as without DDP: checkpoints move between the two
    module = make_module(pl)
    with pytest.raises(ValueError, match="use Trainer.strategy='ampplug'"):
        make_trainer(pl, 1, "ddp", devices=2, plugins=[own.AmpPlugPrecision()]).fit(module, loader(1))
    assert type(module.net[0]) is nn.Linear and module.net[0].weight.dtype == torch.float32


def check_evaluation(rank):
    """Without fit, and with more processes."""
    pl, own = load()
    trainer = make_trainer(pl, 1, devices=2, use_distributed_sampler=False)
    assert trainer.validate(make_module(pl, seed=rank), loader(2, rank), verbose=False)


def check_fabric(rank, path):
    """Accumulation without synchronization in between, clipping, resume."""
    wanted, net, o = run_fabric(make_fabric(devices=2), range(20), clip={"max_norm": 0.05}, accumulate=2, seed=rank, rank=rank)
    assert agree(everything(net, o))
    run_fabric(make_fabric(devices=2), range(10), clip={"max_norm": 0.05}, accumulate=2, seed=rank, rank=rank, path=path)
    dist.barrier()
    fabric = make_fabric(devices=2)
    found, again, again_o = run_fabric(fabric, range(10, 20), clip={"max_norm": 0.05}, accumulate=2, seed=rank + 2, rank=rank, path=path)
    assert torch.equal(everything(again, again_o), everything(net, o)) and torch.equal(torch.stack(found), torch.stack(wanted[20:]))


def worker(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    wanted = check_trainer(rank, PACKAGES[0], "O2", f"{path}/a")
    check_same_as_ddp_by_hand(rank, wanted)
    check_trainer(rank, PACKAGES[0], "O2", f"{path}/b", accumulate=2)
    check_trainer(rank, PACKAGES[0], "O1", f"{path}/c", manual=True)
    check_trainer(rank, PACKAGES[1], "O2", f"{path}/d", manual=True)
    check_plugin(rank)
    check_evaluation(rank)
    check_fabric(rank, f"{path}/f")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes(tmp_path):
    """One spawn for all of the checks above; a failed assertion in a worker is raised here. expect: no error."""
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
