"""benchmarks/convergence.py: nine small runs, stopped and gone on with, and their summary."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


SMALL = ["--preset", "small", "--device", "cpu", "--width", "32", "--layers", "1", "--heads", "2", "--ffn", "64", "--sequence", "32", "--batch", "2", "--eval-bytes", "256"]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("convergence", ROOT / "benchmarks" / "convergence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{i} times {i} makes {i * i}. " for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def nine(benchmark, text, tmp_path_factory):
    """Nine runs, made in this process: the imports of nine others would be most of the time."""
    out = tmp_path_factory.mktemp("nine")
    handlers = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]
    for seed in range(3):
        for mode in ("bf16", "o1", "o2"):
            assert benchmark.main([*SMALL, "--data", str(text), "--steps", "8", "--out", str(out), "--one", f"{mode}:{seed}"]) == 0
    for number, handler in handlers:
        signal.signal(number, handler)
    return out


class TestConvergence:
    def test_summary(self, benchmark, nine, capsys):
        """expect: all nine losses and the six gaps, as computed from the files; the plot; no checkpoint left."""
        assert benchmark.main(["--out", str(nine), "--summary"]) == 0
        rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "seed" not in line]
        loss = {(r["mode"], r["seed"]): r["result"]["held_out_loss"] for r in (json.loads(f.read_text()) for f in nine.glob("run-*.json"))}
        assert len(rows) == len(set(loss.values())) == 9
        for row in rows:
            mode, seed = row[2].strip(), int(row[1])
            gap = 100 * (loss[mode, seed] / loss["bf16", seed] - 1)
            assert row[3].strip() == f"{loss[mode, seed]:.5f}" and row[4].strip() == ("" if mode == "bf16" else f"{gap:+.3f} %")
        assert (nine / "convergence.png").stat().st_size > 1000 and (nine / "summary.md").exists() and not list(nine.rglob("checkpoint*.pt"))

    def test_goes_on_after_the_limit(self, benchmark, text, nine, tmp_path, monkeypatch, capsys):
        """Stopped at step 5 and again at once. expect: exit codes that say so, then the curve of the run that was not stopped, bit for bit."""
        words = [*SMALL, "--data", str(text), "--steps", "8", "--out", str(tmp_path), "--one", "o2:1"]
        asked = iter([False] * 9 + [True] * 1000)  # twice a step
        monkeypatch.setattr(benchmark, "_stopper", lambda deadline: lambda: next(asked))
        assert benchmark.main(words) == benchmark.STOPPED and benchmark.main(words) == benchmark.STOPPED
        said = capsys.readouterr().out
        assert "stopped at step 4" in said and "goes on at step 4" in said and not list(tmp_path.glob("*.json"))
        monkeypatch.setattr(benchmark, "_stopper", lambda deadline: lambda: False)
        assert benchmark.main(words) == 0
        a, b = (json.loads((folder / "run-o2-seed1.json").read_text()) for folder in (nine, tmp_path))
        assert (a["result"]["curve"], a["result"]["held_out_curve"]) == (b["result"]["curve"], b["result"]["held_out_curve"])

    def test_processes(self, benchmark, text, tmp_path, monkeypatch, capsys):
        """The command, interrupted after the first checkpoint, and once more. expect: the run stops where it is, and is then brought to its end."""
        words = [*SMALL, "--data", str(text), "--steps", "200", "--modes", "o1", "--seeds", "0", "--jobs", "2", "--out", str(tmp_path)]
        sleep, pressed = time.sleep, []

        def interrupted(seconds):
            sleep(seconds)
            if not pressed and list(tmp_path.rglob("checkpoint.pt")):
                pressed.append(True)
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(benchmark.time, "sleep", interrupted)
            assert benchmark.main(words) == 130
        file = tmp_path / "checkpoints" / "o1-seed0" / "checkpoint.pt"
        step = torch.load(file, weights_only=True)["phase"]["step"]
        assert 50 < step < 200 and not list(tmp_path.glob("*.json"))  # 50 is the periodic one
        assert benchmark.main([*words, "--time-limit", "0.001"]) == 0 and "time limit: 1 runs are left" in capsys.readouterr().out
        assert benchmark.main([*words, "--time-limit", "1000"]) == 0
        assert len(json.loads((tmp_path / "run-o1-seed0.json").read_text())["result"]["curve"]) == 200 and not file.exists()

    def test_when_a_run_stops(self, benchmark):
        handlers = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]
        try:
            assert benchmark._stopper(time.time() - 1)() and not benchmark._stopper(time.time() + 100)()
            for number, _ in handlers:
                stop = benchmark._stopper(None)
                assert not stop()
                signal.raise_signal(number)
                assert stop()
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)

    def test_refusals(self, benchmark, text, nine, tmp_path, capsys):
        """expect: one line before any process begins; results of other settings are not taken for these."""
        words = [*SMALL, "--data", str(text), "--steps", "8"]
        for more, said in (
            (["--out", str(nine), "--recipe", "current"], "run-bf16-seed0.json', it has other settings: recipe was 'delayed' and is now 'current'"),
            (["--out", str(tmp_path), "--select", "blok.*"], "pattern 'blok.*' matches none"),
            (["--out", str(tmp_path), "--modes", "o9"], "mode 'o9' is none of"),
            (["--out", str(tmp_path), "--eval-bytes", str(10**9)], "--eval-bytes wants"),
            (["--out", str(tmp_path), "--jobs", "0"], "jobs is 0"),
            (["--out", str(tmp_path), "--summary"], "no run-*.json"),
        ):
            assert benchmark.main([*words, *more]) == 2
            err = capsys.readouterr().err
            assert said in err and err.count("\n") == 1, err
        assert benchmark.main([*words, "--out", str(nine)]) == 0 and "0 runs to make" in capsys.readouterr().out
