"""`ampplug.capture` where there is no GPU: the same script runs, eagerly. (tests/gpu/test_capture.py has the rest.)"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ampplug
from ampplug import graph


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_steps_run_eagerly():
    graph._warned.clear()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = ampplug.capture(step, model, optimizer)
    with pytest.warns(UserWarning, match="on 'cpu' the step runs eagerly"):
        first = fast(torch.ones(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert fast(torch.ones(2, 8)) < first


def test_wrong_arguments():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, words in (
        ((3, model, optimizer), "step is a int; it must be a function"),
        ((print, 3, optimizer), "model is a int; it must be a torch.nn.Module"),
        ((print, model, None), "optimizer is a NoneType"),
        ((print, model, [optimizer, 3]), "optimizer is a int"),
    ):
        with pytest.raises(TypeError, match=words):
            ampplug.capture(*arguments)
    for arguments, words in (((print, model, []), "optimizer is an empty list"), ((print, nn.Identity(), optimizer), "Identity\\) has no parameters")):
        with pytest.raises(ValueError, match=words):
            ampplug.capture(*arguments)
