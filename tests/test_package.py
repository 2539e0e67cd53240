"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampplug

ROOT = Path(__file__).parent.parent
OPTIONAL = ("triton", "transformers", "accelerate", "deepspeed", "lightning", "transformer_engine", "matplotlib", "tqdm")


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.fixture
def project() -> dict:
    """pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_import_brings_nothing_optional():
    found = run(f"import sys, ampplug, ampplug.integrations; print([m for m in {OPTIONAL} if m in sys.modules])")
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_broken_optional_packages_do_not_matter(tmp_path):
    for name in ("transformer_engine", "deepspeed", "lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('undefined symbol')")
    code = (
        "import torch, ampplug; m = torch.nn.Sequential(torch.nn.Linear(32, 32)); o = torch.optim.AdamW(m.parameters());"
        "m, o = ampplug.initialize(m, o); m(torch.randn(16, 32)).sum().backward(); o.step(); print('fine')"
    )
    found = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert found.stdout.strip() == "fine", found.stderr


def test_public_names_load():
    for name in ampplug.__all__:
        assert getattr(ampplug, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = ampplug.initialise


def test_integrations_are_importable():
    import ampplug.integrations

    assert ampplug.integrations.__doc__


def test_version(project):
    """One source: the package's attribute. expect: the installed metadata agree; if not, install anew."""
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ampplug.__version__"}
    assert importlib.metadata.version("ampplug") == ampplug.__version__


def test_types_are_shipped(project):
    assert importlib.resources.files("ampplug").joinpath("py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["ampplug"]


def test_every_package_is_listed(project):
    """setuptools is given the packages by name, because `integrations/` lies outside. expect: none is forgotten."""
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "ampplug").rglob("__init__.py")}
    found |= {"ampplug." + ".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "integrations").rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_torch_is_the_only_requirement(project):
    assert [requirement.split(">")[0] for requirement in project["project"]["dependencies"]] == ["torch"]
