"""Shared by the tests of Lightning's Trainer and Fabric: data, a module, and the same training by hand."""

import importlib

import torch
from torch import nn

import ampplug

PACKAGES = [("lightning.pytorch", "lightning_pytorch"), ("pytorch_lightning", "pytorch_lightning")]


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
