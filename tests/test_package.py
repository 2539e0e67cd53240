"""The package as it is installed, and its command line."""

import os
import subprocess
import sys

import pytest

from ampplug import cli


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})


def test_import_brings_nothing_optional():
    code = "import sys, ampplug; print([m for m in ('triton', 'transformers', 'deepspeed', 'lightning', 'transformer_engine', 'matplotlib') if m in sys.modules])"
    found = run(code)
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


def test_integrations_are_importable():
    import ampplug.integrations

    assert ampplug.integrations.__doc__


def test_plan_command(capsys, tmp_path, monkeypatch):
    assert cli.main(["plan", "--preset", "124m"]) == 0
    assert "lm_head" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("import torch\ndef build(): return torch.nn.Sequential(torch.nn.Linear(64, 64))\ndef wrong(): return 3\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "mine:build", "--opt-level", "O1"]) == 0
    assert "64x64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["plan"], "either a model"),
        (["plan", "--preset", "2b"], "'2b'"),
        (["plan", "nowhere:build"], "cannot import 'nowhere'"),
        (["plan", "os:nothing"], "no callable 'nothing'"),
        (["plan", "os"], "module:callable"),
        (["plan", "os:getcwd"], "returned a str"),
    ],
)
def test_plan_errors_are_one_line(arguments, words, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
