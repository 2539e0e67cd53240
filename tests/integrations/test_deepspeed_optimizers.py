"""Which optimizer O2 starts from, without an engine."""

import warnings

import pytest
import torch

pytest.importorskip("deepspeed")

from ampplug.integrations.deepspeed.optimizers import adam_configuration, adam_of, from_fused_adam


class FusedAdam(torch.optim.Optimizer):
    """What DeepSpeed's is before its extension is compiled."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = 1 if adam_w_mode else 0


@pytest.mark.parametrize("adam_w_mode, kind", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam(adam_w_mode, kind):
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [model.weight], "weight_decay": 0.3}, {"params": [model.bias], "lr": 0.5, "name": "biases"}]
    fused = FusedAdam(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-5, adam_w_mode=adam_w_mode)
    schedule = torch.optim.lr_scheduler.StepLR(fused, 1, 0.5)
    optimizer = adam_of(None, fused, None)
    assert type(optimizer) is kind
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.1, (0.8, 0.9), 1e-5, 0.3)
    assert (second["lr"], second["weight_decay"], second["name"]) == (0.5, 0.0, "biases") and second["params"][0] is model.bias
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()  # of the first optimizer: it sets the rates of the second
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.25]


def test_fused_adam_without_bias_correction():
    with pytest.raises(ValueError, match="bias_correction"):
        from_fused_adam(FusedAdam(torch.nn.Linear(4, 4).parameters(), bias_correction=False))
    with pytest.raises(ValueError, match="bias_correction"):
        adam_configuration({"lr": 1e-3, "bias_correction": False}, True)


def test_configuration_has_fused_adams_defaults():
    """Not torch's: its AdamW decays weights by 0.01 unless told otherwise."""
    parameters = {"lr": 1e-3, "betas": [0.9, 0.95], "set_grad_none": True}
    kind, more = adam_configuration(parameters, True)
    optimizer = kind(torch.nn.Linear(4, 4).parameters(), **parameters, **more)
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["weight_decay"] == 0.0
    kind, more = adam_configuration({"lr": 1e-3, "weight_decay": 0.2}, False)
    assert kind is torch.optim.Adam and more == {"weight_decay": 0.2}
