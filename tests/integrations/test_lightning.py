"""Lightning's Trainer, the real packages on CPU: the same numbers as a loop by hand, exact resume, clear refusals."""

import importlib
import pickle
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampplug

pytest.importorskip("lightning")

from lightning_helpers import (
    PACKAGES,
    Resumable,
    batches,
    by_hand,
    everything,
    load,
    loader,
    loss_of,
    make_module,
    make_trainer,
    network,
    plain_optimizer,
)

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


# ---------------------------------------------------------------- the same numbers as by hand


ALL = [(PACKAGES[0], p, form, level) for p in ("32-true", "bf16-mixed", "bf16-true") for form in ("strategy", "plugin") for level in ("O1", "O2")]
# the classes for the second package are made by the same code: every value once
SOME = [(PACKAGES[1], "32-true", "strategy", "O2"), (PACKAGES[1], "bf16-mixed", "plugin", "O1"), (PACKAGES[1], "bf16-true", "strategy", "O1")]


@pytest.mark.parametrize(("package", "precision", "form", "level"), ALL + SOME, indirect=["package"], ids=lambda v: v[0] if isinstance(v, tuple) else v)
def test_same_as_by_hand(package, precision, form, level):
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


FORMS = ("automatic", "manual", "accumulation", "end of epoch", "plugin")


@pytest.mark.parametrize(("package", "form", "level"), [(PACKAGES[0], f, level) for f in FORMS for level in ("O1", "O2")]
                         + [(PACKAGES[1], "automatic", "O2"), (PACKAGES[1], "plugin", "O1")], indirect=["package"], ids=lambda v: v[0] if isinstance(v, tuple) else v)  # fmt: skip
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
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is own.AmpPlugStrategy and again.config == strategy.config
    for kind in (own.AmpPlugPrecision, own.AmpPlugStrategy, own.AmpPlugFabricStrategy):
        assert pickle.loads(pickle.dumps(kind)) is kind and kind.__module__ == own.__name__ and kind.__name__ in kind.__doc__
    fabric = importlib.import_module("lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric")
    assert issubclass(own.AmpPlugPrecision, pl.plugins.precision.Precision) and issubclass(own.AmpPlugStrategy, pl.strategies.DDPStrategy)
    assert issubclass(own.AmpPlugFabricStrategy, fabric.strategies.DDPStrategy)
    from ampplug.integrations import lightning

    assert issubclass(lightning.AmpPlugStrategy, load()[0].strategies.DDPStrategy)


def test_package_in_use(monkeypatch):
    """expect: the package that is there; an error that names both where there is none."""
    from ampplug.integrations import lightning

    assert lightning._used()[0].__name__ == "ampplug.integrations.lightning_pytorch"
    monkeypatch.setitem(sys.modules, "lightning", None)
    assert [m.__name__ for m in lightning._used()] == ["ampplug.integrations.pytorch_lightning"]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match="needs lightning or pytorch-lightning: pip install"):
        lightning._used()


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
