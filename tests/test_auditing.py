"""`ampplug.audit`: its accounting and its verdicts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import ampplug
from ampplug.auditing import Audit

FOUND = Audit(
    device="some GPU", layers=10, small_layers=0, wall_ms=10.0, host_ms=2.0, gpu_ms=9.5, launches={"casts": 20.0, "other": 40.0, "total": 60.0}, own_launches=24.0,
    launches_per_layer=5.0, syncs=(), bytes_per_parameter={"parameters": 2.0, "total": 10.0}, parameters=1000, peak_bytes=1 << 30,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:ampplug")
def test_audit_on_a_cpu():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    calls = []

    def step(x):
        calls.append(1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    before = model[0].weight.detach().clone()
    found = ampplug.audit(step, torch.randn(8, 64), model=model, optimizer=optimizer, steps=2, warm_up=1)
    assert len(calls) == 3 and not torch.equal(before, model[0].weight)  # it trains
    assert found.layers == found.small_layers == 2 and found.gpu_ms is None and found.launches is None and found.wall_ms >= found.host_ms > 0
    kinds = found.bytes_per_parameter
    assert kinds["FP8 copies"] == pytest.approx(2, abs=0.1) and kinds["total"] == pytest.approx(10.1, abs=0.3)
    assert any("emulated" in line for line in found.verdict) and "bytes a parameter" in str(found)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, "GPU-bound"),
        ({"gpu_ms": 3.0, "host_ms": 9.9}, "host-bound: the GPU idles 70 % of the time while the host makes 60 launches.*ampplug.capture"),
        ({"gpu_ms": 3.0, "host_ms": 1.0}, "idles 70 %.*data loading"),
        ({"syncs": (("train.py", 7, "loss.item()", 2),)}, r"waits for the GPU 2 times a step at train.py:7: `loss.item\(\)`"),
        ({"small_layers": 4}, "4 of 10 FP8 layers are small"),
        ({"layers": 0}, "no layer computes in FP8"),
    ],
)
def test_verdicts(changed, words):
    import re

    found = dataclasses.replace(FOUND, **changed)
    assert re.search(words, "\n".join(found.verdict)), found.verdict
    assert len(found.verdict) == 1 and found.verdict[0] in str(found)


def test_report_names_everything():
    text = str(FOUND)
    for words in ("time a step: 10.00 ms; host 2.00 ms; GPU busy 9.50 ms, idle 5 %", "launches a step: 60 (casts 20, other 40); by ampplug's own count 24", "5.00", "peak memory: 1.00 GiB"):
        assert words in text


def test_wrong_arguments():
    model = nn.Linear(4, 4)
    for arguments, words in (
        (dict(step=3, model=model), "step is a int"),
        (dict(step=print, model=3), "model is a int"),
        (dict(step=print, model=model, steps=0), "steps is 0"),
        (dict(step=print, model=model, warm_up=-1), "warm_up is -1"),
        (dict(step=print, model=model, optimizer=3), "optimizer is a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            ampplug.audit(**arguments)


def test_a_compiled_layer_counts_once():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    ampplug.initialize(model, None, "O1")
    model[0] = torch.compile(model[0])
    assert ampplug.audit(lambda: None, model=model, steps=1, warm_up=0).layers == 1
