"""Shared by all tests. Without a GPU, Triton's interpreter runs the kernels; it must be asked for before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: a GPU if there is one, else the CPU with the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU with FP8 units"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
