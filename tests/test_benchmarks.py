"""The benchmarks run: small models on whatever is here. Their times are not looked at; that their check of learning catches a row that does not, is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def train_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import train_step

    return train_step


@pytest.mark.filterwarnings("ignore:ampplug")
def test_train_step(train_step, tmp_path: Path, monkeypatch):
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train_step.py", *arguments])
        return train_step.main()

    sizes = ["--vocabulary", "128", "--sequence", "32", "--width", "64", "--hidden", "96", "--layers", "1", "--heads", "4", "--groups", "2", "--lr", "1e-2"]
    assert 0 == run("--micro-batch", "2", "--ways", "eager,graph", "--rounds", "1", "--steps", "2", "--learn", "12", *sizes, "--out", str(tmp_path))
    (file,) = tmp_path.glob("train_step-2-*.json")
    content = json.loads(file.read_text())
    rows = {(r["mode"], r["way"]): r for r in content["rows"]}
    assert list(rows) == [(m, w) for m in ("bf16", "o1", "o2") for w in ("eager", "graph")]
    for mode in ("bf16", "o1", "o2"):  # without a GPU both ways are the same steps from the same weights, or the one before left something behind
        if not torch.cuda.is_available():
            assert rows[mode, "eager"]["losses"] == rows[mode, "graph"]["losses"]
        assert rows[mode, "eager"]["loss"][1] < rows[mode, "eager"]["loss"][0] - 1
    assert rows["bf16", "eager"]["gradient_cosine"] > 0.999 and 0.98 < rows["o2", "eager"]["gradient_cosine"] < 0.9999  # FP8 is really there
    if not torch.cuda.is_available():
        assert [note.split(":")[0] for note in content["notes"]] == ["te", "torchao", "MS-AMP"]
    assert run("--summary", "--out", str(tmp_path)) == 0
    assert "| 2 | o2 | eager |" in (tmp_path / "train_step.md").read_text() and (tmp_path / "train_step.png").stat().st_size > 1000
    assert run("--summary", "--out", str(tmp_path / "none")) == 1
    with pytest.raises(SystemExit):
        run("--modes", "o1")


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({}, ""),
        ({"gradient_cosine": 0.9}, "cosine 0.900 < 0.98"),
        ({"gradient_cosine": float("nan")}, "cosine nan"),
        ({"loss": [10.0, 6.5]}, "loss 6.500 against BF16's 6.000"),
        ({"loss": [10.0, float("nan")]}, "loss nan"),
        ({"loss": [10.0, 5.0]}, "loss 5.000 against 5.900 in way eager"),
    ],
)
def test_rows_that_do_not_learn_do_not_count(changed, reason, train_step):
    rows = [{"mode": m, "way": w, "gradient_cosine": 0.99, "loss": [10.0, loss]} for m, w, loss in (("bf16", "eager", 6.0), ("o2", "eager", 5.9), ("o2", "graph", 5.9))]
    rows[2].update(changed)
    train_step.judge(rows)
    assert [r["counts"] for r in rows] == [True, True, not reason] and reason in rows[2]["reason"]
    for r in rows:
        r["loss"] = [10.0, 9.99]
    train_step.judge(rows)
    assert not any(r["counts"] for r in rows)
