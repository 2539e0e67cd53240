"""The benchmarks run: small models on whatever is here. Their times are not looked at; that their check of learning catches a row that does not, is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_te import te  # noqa: F401

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


@pytest.mark.filterwarnings("ignore:ampplug")
def test_te_step(te, tmp_path: Path, monkeypatch, capsys):  # noqa: F811
    """On the double of Transformer Engine; without any it says so."""
    import types

    monkeypatch.syspath_prepend(str(ROOT))
    import peers
    import te_step
    import transformer_engine
    import transformer_engine.pytorch as package

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, parameters, *, adam_w_mode, master_weights, exp_avg_dtype, exp_avg_sq_dtype, capturable, **settings):
            assert adam_w_mode and master_weights and exp_avg_dtype == exp_avg_sq_dtype
            super().__init__(parameters, **settings)

    class Recipe(te.recipe.DelayedScaling):
        def __init__(self, **settings):
            vars(self).update(settings)

    monkeypatch.setattr(package, "optimizers", types.SimpleNamespace(FusedAdam=FusedAdam), raising=False)
    monkeypatch.setattr(te.recipe, "Format", types.SimpleNamespace(HYBRID="HYBRID"), raising=False)
    monkeypatch.setattr(te.recipe, "DelayedScaling", Recipe)
    monkeypatch.setattr(transformer_engine, "__version__", "2.20.2")
    sizes = ["--vocabulary", "128", "--sequence", "32", "--width", "64", "--hidden", "96", "--layers", "1", "--heads", "4", "--groups", "2", "--lr", "1e-2"]
    monkeypatch.setattr(sys, "argv", ["te_step.py", "--micro-batch", "2", "--rounds", "1", "--steps", "1", "--learn", "12", *sizes, "--out", str(tmp_path)])
    assert te_step.main() == 1 and "needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(peers, "why_not", lambda name: None)
    assert te_step.main() == 0
    rows = json.loads((tmp_path / "te_step-2.json").read_text())["rows"]
    assert [(r["row"], r["way"]) for r in rows] == [("te-fp32", "eager"), ("te-fp32", "graph"), ("te-fp8", "eager"), ("ampplug", "eager"), ("ampplug", "graph")]
    assert all(r["loss"][1] < r["loss"][0] - 0.5 for r in rows) and te_step.part_of("void cublasLt::nvjet_qqtst") == "products"
    assert te_step.part_of("transpose_kernel") == "optimizer" and te_step.part_of("void transformer_engine::cast_transpose_kernel") == "casts"
