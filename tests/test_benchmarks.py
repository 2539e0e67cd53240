"""The benchmarks run: small models on whatever is here. Their figures are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_train_step(tmp_path: Path):
    sizes = ["--vocabulary", "128", "--sequence", "32", "--width", "64", "--hidden", "96", "--layers", "2", "--heads", "4", "--groups", "2", "--lr", "3e-3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--micro-batches", "2", "--ways", "eager,graph", "--rounds", "2", "--steps", "24"]
    run = subprocess.run([*command, *sizes, "--out", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "train_step.json").read_text())["rows"]
    assert [(r["mode"], r["way"]) for r in rows] == [(m, w) for m in ("bf16", "o1", "o2") for w in ("eager", "graph")]
    assert all(r["counts"] for r in rows), rows
    assert rows[0]["gradient_cosine"] > 0.999 and 0.98 < rows[2]["gradient_cosine"] < 0.9999  # FP8 is really there
    assert "| 2 | o2 | eager |" in (tmp_path / "train_step.md").read_text()
