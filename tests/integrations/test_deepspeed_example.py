"""The example trains under both launchers, as its text says, and the benchmark runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "1"],
}


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_example(tmp_path, launcher):
    config = json.loads((ROOT / "examples" / "ds_config.json").read_text())
    config["scheduler"]["params"]["warmup_num_steps"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    example = [str(ROOT / "examples" / "deepspeed_gpt.py"), "--deepspeed_config", str(tmp_path / "config.json"), "--steps", "5", "--data", str(ROOT / "docs")]
    command = [sys.executable, *LAUNCHERS[launcher], "--master_port", free_port(), *example]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=570)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ampplug is active: opt_level O2, ZeRO stage 2, 18 weights" in run.stdout
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", run.stdout, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.3, run.stdout


def test_benchmark(tmp_path):
    """A small model on whatever is here; the figures are not looked at."""
    sizes = "--vocabulary 128 --sequence 32 --width 64 --hidden 96 --layers 2 --heads 4 --groups 2 --lr 3e-3 --micro-batch 2 --rounds 1 --steps 18"
    command = [sys.executable, str(ROOT / "benchmarks" / "deepspeed_step.py"), *sizes.split(), "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_PORT": free_port()}, timeout=570)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "deepspeed_step.json").read_text())["rows"]
    assert [r["mode"] for r in rows] == ["bf16", "o1", "o2"] and all(r["counts"] for r in rows), rows
    assert len({r["loss"][1] for r in rows}) == 3  # FP8 is really there
    assert "| o2 |" in (tmp_path / "deepspeed_step.md").read_text()
