"""The command line: `ampplug plan`, its choices and its errors; `ampplug demo` is tested in tests/demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ampplug
from ampplug import cli

MODELS = """
import torch
from torch import nn

def build():
    return nn.ModuleDict({"body": nn.Linear(64, 48), "lm_head": nn.Linear(48, 32)})

def reads_values():
    sizes = [int(x.item()) for x in torch.linspace(16, 32, 2)]
    return nn.Linear(*sizes)

def wants_argument(size): return nn.Linear(size, size)
def fails(): raise RuntimeError("first line\\nsecond line")
def fails_silently(): raise AssertionError
def nothing(): pass
def lazy(): return nn.LazyLinear(8)
NUMBER = 7
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with modules of the user's, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("cli_models", "cli_syntax", "cli_raises", "cli_misses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "cli_syntax.py").write_text("def build(:\n")
    (tmp_path / "cli_raises.py").write_text("raise ValueError('on import')\n")
    (tmp_path / "cli_misses.py").write_text("import package_that_is_not_there\n")
    return "cli_models"


def converted(text: str) -> list[str]:
    """Names of the layers in FP8, from the printed plan."""
    rows = [line.split() for line in text.split("\n\n")[0].splitlines()[2:]]
    return [row[0] for row in rows if row[3] == "FP8"]


@pytest.mark.parametrize(
    "preset,device,count,of", [("small", None, 18, 19), ("small", "cuda", 0, 19), ("124m", "cpu", 72, 73), ("124m", None, 24, 73), ("1b", None, 96, 97)]
)
def test_plan_of_presets(preset, device, count, of, capsys):
    """1b takes no memory: it is built on the meta device. expect: all but the head in FP8, and on a GPU but those too small to gain."""
    assert cli.main(["plan", "--preset", preset, *(["--device", device] if device else [])]) == 0
    out = capsys.readouterr().out
    where = "CPU" if device == "cpu" or (preset, device) == ("small", None) else "CUDA"
    assert f"for {where}: {count} of {of} layers in FP8" in out and "lm_head" not in converted(out)
    assert "bytes per parameter: 10.01" in out


def test_plan_of_a_model(models, capsys):
    assert cli.main(["plan", f"{models}:build", "--opt-level", "O1", "--recipe", "current"]) == 0
    out = capsys.readouterr().out
    assert "level O1, recipe current" in out and "48x64" in out


def test_plan_of_a_model_that_reads_values(models, capsys):
    """The meta device has no values. expect: built for real."""
    assert cli.main(["plan", f"{models}:reads_values"]) == 0
    assert "32x16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "select,expected",
    [
        ([], ["body"]),
        (["--select", "auto"], ["body"]),
        (["--select", "all"], ["body", "lm_head"]),
        (["--select", "lm_*"], ["lm_head"]),
        (["--select", "lm_*", "--select", "bod?"], ["body", "lm_head"]),
    ],
)
def test_plan_select(select, expected, models, capsys):
    """Before and after the model: an option must not swallow it."""
    for arguments in (["plan", *select, "--device=cpu", f"{models}:build"], ["plan", f"{models}:build", *select, "--device=cpu"]):
        assert cli.main(arguments) == 0
        assert converted(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["plan"], "either a model"),
        (["plan", "--preset", "small", "cli_models:build"], "either a model"),
        (["plan", "--preset", "2b"], "'2b' is not legal; legal are 'small', '124m', '1b'"),
        (["plan", "cli_models"], "module:callable"),
        (["plan", "cli_models:"], "module:callable"),
        (["plan", ":build"], "module:callable"),
        (["plan", "nowhere:build"], "cannot import 'nowhere'"),
        (["plan", ".nowhere:build"], "cannot import '.nowhere'"),
        (["plan", "cli_syntax:build"], "SyntaxError"),
        (["plan", "cli_raises:build"], "ValueError: on import"),
        (["plan", "cli_misses:build"], "package_that_is_not_there"),
        (["plan", "cli_models:absent"], "no callable 'absent'"),
        (["plan", "cli_models:NUMBER"], "no callable 'NUMBER'"),
        (["plan", "cli_models:nothing"], "returned a NoneType"),
        (["plan", "cli_models:wants_argument"], "wants_argument() raised TypeError"),
        (["plan", "cli_models:fails"], "fails() raised RuntimeError: first line"),
        (["plan", "cli_models:fails_silently"], "fails_silently() raised AssertionError"),
        (["plan", "cli_models:lazy"], "cannot be planned"),
        (["plan", "cli_models:build", "--select=bodi"], "pattern 'bodi' matches none of the model's 2 layers, such as 'body'"),
        (["plan", "cli_models:build", "--select", "all", "--select", "x"], "--select all stands alone"),
    ],
)
def test_errors_are_one_line(arguments, words, models, capsys):
    """expect: exit status 2, one line that names the fault, nothing on stdout."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ampplug: error: ") and words in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["train"], ["plan", "--opt-level", "O3"], ["plan", "--recipe", "none"]])
def test_illegal_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and "error:" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == f"ampplug {ampplug.__version__}"


def test_help_imports_nothing_heavy():
    code = "import sys\nfrom ampplug import cli\ntry: cli.main(['demo', '--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stderr.strip() == "False" and "--preset" in found.stdout, found.stderr


def test_reader_that_leaves_early():
    """As `ampplug plan ... | head -0` is. expect: no traceback."""
    command = subprocess.Popen([sys.executable, "-m", "ampplug", "plan", "--preset", "1b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    error = command.stderr.read()
    command.stderr.close()
    assert command.wait(timeout=120) == 1 and error == b""


def test_audit_of_a_preset(capsys):
    assert cli.main(["audit", "--preset", "small"]) == 0
    out = capsys.readouterr().out
    assert "ampplug audit: cpu, 18 FP8 layers" in out and "emulated" in out and "bytes a parameter: 10.0" in out


def test_audit_of_ones_own_step(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch, ampplug\n"
        "def make():\n"
        "    model = torch.nn.Linear(32, 32)\n"
        "    model, optimizer = ampplug.initialize(model, torch.optim.AdamW(model.parameters()))\n"
        "    def step(x):\n"
        "        optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()\n"
        "    return step, model, optimizer, torch.randn(4, 32)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "mine:make"]) == 0
    assert "1 FP8 layers, 1056 parameters" in capsys.readouterr().out
    assert cli.main(["audit", "mine:wrong"]) == 2
    assert "returned a int; it must return (step, model, optimizer, *batch)" in capsys.readouterr().err
    for words in (["audit"], ["audit", "mine:make", "--preset", "small"], ["audit", "--preset", "big"], ["audit", "mine"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
