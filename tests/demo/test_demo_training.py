"""The demo as a command, at tiny sizes: same starts, exact resuming, complete results, clear errors."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ampplug import demo
from ampplug.demo import DemoError, checkpoint, compare, data, settings, train
from ampplug.demo.model import SHAPES, Shape, build
from ampplug.demo.progress import Progress, threads

STEPS = 10
SIZES = ["--width", "32", "--layers", "1", "--heads", "2", "--ffn", "64", "--sequence", "32", "--batch", "4", "--eval-bytes", "256"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with something to learn."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("".join(f"{i} times {i} makes {i * i}. " for i in range(2000)))
    return path


def run(text: Path, out: Path, *more: str) -> int:
    """The command, as the CLI calls it."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    words = ["--device", "cpu", "--data", str(text), "--out", str(out), "--steps", str(STEPS), *SIZES, *more]
    return demo.run(parser.parse_args(words))


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def curves(out: Path) -> dict[str, Any]:
    return {name: (r["curve"], r["held_out_curve"]) for name, r in results(out)["runs"].items()}


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    assert run(text, out) == 0
    return out


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *when: tuple[str, int]) -> None:
    """Ctrl-C once after each of these (title, step)."""
    left = list(when)
    update = Progress.update

    def interrupted(self: Progress, step: int, loss: float, rate: float) -> None:
        update(self, step, loss, rate)
        if (self.title, step) in left:
            left.remove((self.title, step))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "update", interrupted)


def test_results_are_complete(whole: Path) -> None:
    content = results(whole)
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["device"].startswith("CPU")
    assert content["seed"] == 0
    assert content["command"].startswith("ampplug demo --data")
    assert set(content["runs"]) == {"bf16", "ampplug"}
    for r in content["runs"].values():
        assert len(r["curve"]) == STEPS
        assert r["train_loss"] == pytest.approx(sum(r["curve"]) / STEPS)
        assert r["held_out_curve"][-1] == [STEPS, r["held_out_loss"]]
        assert r["tokens_per_second"] == pytest.approx(4 * 32 / r["step_seconds"])
        assert all(math.isfinite(x) for x in r["curve"])
    losses = {k: r["held_out_loss"] for k, r in content["runs"].items()}
    assert content["relative_gap_percent"]["held_out_loss"] == pytest.approx(100 * (losses["ampplug"] / losses["bf16"] - 1))
    assert (whole / "losses.png").stat().st_size > 1000


def test_loss_falls_and_the_runs_agree(whole: Path) -> None:
    bf16, fp8 = (results(whole)["runs"][name]["curve"] for name in ("bf16", "ampplug"))
    for curve in (bf16, fp8):
        assert curve[0] == pytest.approx(math.log(256), abs=0.1)  # knows nothing yet
        assert curve[-1] < curve[0] - 0.8
    assert fp8[0] == pytest.approx(bf16[0], rel=1e-3)  # the same start on the same batch
    assert fp8 != bf16  # and yet it is FP8
    assert fp8 == pytest.approx(bf16, rel=0.02)


def test_bytes_are_those_of_the_tensors(whole: Path) -> None:
    runs = results(whole)["runs"]
    bf16, fp8 = (runs[name]["bytes_per_parameter"] for name in ("bf16", "ampplug"))
    assert bf16["parameters"] == bf16["gradients"] == 4.0
    assert bf16["optimizer state"] == pytest.approx(8.0, abs=0.05)
    assert bf16["FP8 copies"] == 0
    count = runs["ampplug"]["parameters"]
    converted = 4 * 32 * 32 + 2 * 32 * 64
    assert fp8["parameters"] == fp8["gradients"] == pytest.approx(4 - 2 * converted / count)
    assert fp8["FP8 copies"] == pytest.approx(2 * converted / count, abs=0.05)
    # 8-bit moments of all, 16-bit remainders of what is split; alignment is much of so small a model
    assert 2 + 2 * converted / count < fp8["optimizer state"] < 2.6 + 2 * converted / count
    for kinds in (bf16, fp8):
        assert kinds["total"] == pytest.approx(sum(v for k, v in kinds.items() if k != "total"))


@pytest.mark.parametrize("when", [[("BF16 AdamW", 3)], [("ampplug O2", 7)], [("BF16 AdamW", STEPS), ("ampplug O2", 1), ("ampplug O2", STEPS)]], ids=str)
def test_resumed_equals_uninterrupted(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: list[tuple[str, int]]
) -> None:
    interrupt_at(monkeypatch, *when)
    handler = signal.getsignal(signal.SIGINT)
    for i, (title, step) in enumerate(when):
        assert run(text, tmp_path, *(["--resume"] if i else [])) == 130
        assert signal.getsignal(signal.SIGINT) is handler
        said = capsys.readouterr().err
        assert "--resume" in said and str(text) in said
        phase = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["phase"]
        assert (phase["mode"], phase["step"]) == ("bf16" if "BF16" in title else "o2", step)
    assert not (tmp_path / "results.json").exists()
    torch.manual_seed(12345)  # a new process would not have this one's generator either
    assert run(text, tmp_path, "--resume") == 0
    if "ampplug" in when[-1][0]:
        assert "BF16 AdamW: step" not in capsys.readouterr().out  # finished phases are not run again
    assert curves(tmp_path) == curves(whole)
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize("level, recipe", [("O1", "delayed"), ("O2", "current")])
def test_other_levels_resume_too(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, recipe: str) -> None:
    more = ["--opt-level", level, "--recipe", recipe]
    assert run(text, tmp_path / "whole", *more) == 0
    interrupt_at(monkeypatch, (f"ampplug {level}", 5))
    assert run(text, tmp_path / "parts", *more) == 130
    assert run(text, tmp_path / "parts", *more, "--resume") == 0
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


def test_resumes_from_a_periodic_checkpoint(text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = compare.save_checkpoint

    def crash(out: Path, content: dict[str, Any]) -> None:
        save(out, content)
        if content["phase"] is not None and content["phase"]["mode"] == "o2":
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(compare, "save_checkpoint", crash)
        with pytest.raises(MemoryError):
            run(text, tmp_path, "--checkpoint-every", "4")
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["phase"]["step"] == 4
    assert run(text, tmp_path, "--checkpoint-every", "3", "--resume") == 0
    assert curves(tmp_path) == curves(whole)


def test_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"format": 1, "torch": "2", "settings": {}, "finished": {}, "phase": None}
    checkpoint.save_checkpoint(tmp_path, first)

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DemoError, match="No space left on device"):
        checkpoint.save_checkpoint(tmp_path, {**first, "torch": "3"})
    assert checkpoint.load_checkpoint(tmp_path) == first
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_resuming_a_finished_run_trains_nothing(text: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = curves(whole)
    monkeypatch.setattr(train.Phase, "run", None)
    assert run(text, whole, "--resume") == 0
    assert "held-out loss" in capsys.readouterr().out
    assert curves(whole) == before


def test_resume_names_what_differs(text: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(text, whole, "--resume", "--seed", "5", "--opt-level", "O1") == 2
    said = capsys.readouterr().err
    assert "seed was 0 and is now 5" in said and "opt_level was 'O2' and is now 'O1'" in said
    assert "recipe" not in said and said.count("\n") == 1
    other = tmp_path / "text"
    other.write_text("another text " * 1000)
    assert run(other, whole, "--resume") == 2
    assert "data was" in capsys.readouterr().err


def test_phases_share_start_and_batches(text: Path) -> None:
    sizes = settings.make_settings("small", "cpu", steps=2, width=32, layers=1, heads=2, ffn=64, sequence=16, batch=2, seed=4)
    torch.manual_seed(1)
    first = train.Phase(sizes, "bf16").model.state_dict()
    torch.manual_seed(2)  # what the first run drew must not matter
    for mode in ("o1", "o2"):
        second = train.Phase(sizes, mode).model.state_dict()
        assert list(first) == list(second)
        assert all(torch.equal(second[k], v.to(second[k].dtype)) for k, v in first.items())
    other = train.Phase(settings.make_settings("small", "cpu", width=32, layers=1, heads=2, ffn=64, sequence=16, seed=5), "bf16").model.state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    "more, said",
    [
        (["--preset", "smal"], r"preset 'smal' is none of 'small', '124m', '1b'; did you mean 'small'\?"),
        (["--opt-level", "O7"], "opt-level 'O7' is none of 'O0', 'O1', 'O2'"),
        (["--recipe", "delayd"], "recipe.*delayd.*delayed"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--device", "meta"], "device 'meta': legal are 'cpu' and 'cuda'"),
        (["--seed", "-1"], "seed=-1 is out of range"),
        (["--seed", "9" * 30], "seed=9+ is out of range"),
        (["--checkpoint-every", "-1"], "checkpoint-every is -1; it must be at least 1, or 0"),
        (["--steps", "0"], "steps is 0; it must be at least 1"),
        (["--width", "30"], "width is 30; it must be a multiple of twice the 2 heads"),
        (["--data", "/nowhere/at/all"], "data '/nowhere/at/all' does not exist"),
        (["--sequence", "100000"], "too small"),
        (["--out", "/dev/null/out"], "cannot write to '/dev/null/out'"),
        (["--resume"], "nothing to resume: .* does not exist; start without --resume"),
        (["--select", "blocks.*,blok.*"], r"pattern 'blok.\*' matches none of the model's 7 layers, such as 'blocks.0."),
        (["--select", "al"], "pattern 'al' matches none"),
        (["--select", ""], "pattern '' matches none"),
    ],
)
def test_errors_are_one_line(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    assert run(text, tmp_path, *more) == 2
    out, err = capsys.readouterr()
    assert "step 1" not in out  # before anything is trained
    assert err.count("\n") == 1 and err.startswith("ampplug demo: error: ")
    assert re.search(said, err)


def test_damaged_checkpoint(text: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """expect: one line with the file, what is wrong with it and what to do; nothing is trained, and the file stays as it is."""
    good = (whole / "checkpoint.pt").read_bytes()
    content = torch.load(whole / "checkpoint.pt", weights_only=True)
    phase = train.Phase(settings.make_settings("small", "cpu", steps=STEPS, width=16, layers=1, heads=2, ffn=64, sequence=32, batch=4), "bf16").state()
    cases: list[tuple[Any, str]] = [
        (b"", "it is empty"),
        (b"not a checkpoint", "it is no file of torch.save"),
        (good[: len(good) // 2], f"it is cut off, {len(good) // 2} bytes are left of it"),
        (good[:500] + bytes(500) + good[1000:], r"it is damaged \("),
        ([1, 2], "it was not written by this demo"),
        ({"format": 1}, "it was not written by this demo"),
        ({**content, "finished": {}, "phase": phase}, "its state does not fit this run"),
        ({**content, "finished": {}, "phase": {}}, "its state does not fit this run"),
    ]
    path = tmp_path / "checkpoint.pt"
    for damage, said in cases:
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:
            torch.save(damage, path)
        before = path.read_bytes()
        assert run(text, tmp_path, "--resume") == 2, said
        out, err = capsys.readouterr()
        assert re.search(f"cannot resume from '.*checkpoint.pt': {said}", err) and err.endswith("; delete it and start anew\n") and err.count("\n") == 1, err
        assert "step 1" not in out and path.read_bytes() == before


def test_folder_never_holds_two_runs(text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run over a finished one. expect: until its first checkpoint all files of the old one; from then on none, but what is of the new one."""
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    seen: list[tuple[set[str], int]] = []
    save = compare.save_checkpoint

    def look(out: Path, content: dict[str, Any]) -> None:
        save(out, content)
        seen.append(({f.name for f in out.iterdir()}, torch.load(out / "checkpoint.pt", weights_only=True)["settings"]["seed"]))

    monkeypatch.setattr(compare, "save_checkpoint", look)
    with monkeypatch.context() as patch:
        patch.setattr(train.Phase, "_train_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(text, tmp_path, "--seed", "3")
    assert curves(tmp_path) == curves(whole) and {f.name for f in tmp_path.iterdir()} == {f.name for f in whole.iterdir()}
    interrupt_at(monkeypatch, ("BF16 AdamW", 4))
    assert run(text, tmp_path, "--seed", "3", "--checkpoint-every", "0") == 130
    assert seen == [({"checkpoint.pt"}, 3)]  # Ctrl-C's alone
    assert run(text, tmp_path, "--seed", "3", "--checkpoint-every", "0", "--resume") == 0
    assert [s for _, s in seen] == [3] * 3 and results(tmp_path)["seed"] == 3  # and one at the end of each run
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in whole.iterdir()}


def test_select_that_is_given_wins() -> None:
    """expect: 'auto' is not taken for the preset's own choice."""
    assert settings.make_settings("small", "cpu").select == settings.make_settings("small", "cpu", select=None).select == "blocks.*"
    assert settings.make_settings("small", "cpu", select="auto").select == "auto"
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert parser.parse_args([]).select is None and parser.parse_args(["--select", "auto"]).select == "auto"


@pytest.mark.parametrize("sizes, set_by_user, expected", [({}, False, 1), ({}, True, 2), ({"width": 64}, False, 2)], ids=["small", "user", "other"])
def test_small_preset_takes_one_thread(sizes: dict[str, int], set_by_user: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with threads(settings.make_settings("small", "cpu", **sizes)):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("preset", ["124m", "1b"])
def test_gpu_presets_want_a_gpu(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DemoError, match=f"preset '{preset}' needs a CUDA device"):
        settings.make_settings(preset)
    with pytest.raises(DemoError, match="finds no CUDA device"):
        settings.make_settings(preset, "cuda")


def test_without_matplotlib_and_tqdm(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(text, tmp_path, "--opt-level", "O0") == 0
    said = capsys.readouterr()
    assert "matplotlib is not installed" in said.err and said.err.count("\n") == 1  # one line
    assert "BF16 AdamW: step 10/10" in said.out
    assert not (tmp_path / "losses.png").exists()
    both = curves(tmp_path)
    assert both["bf16"] == both["ampplug"]  # O0 changes nothing


@pytest.mark.parametrize("preset, least, most", [("small", 0.4e6, 1e6), ("124m", 80e6, 130e6), ("1b", 0.8e9, 1.2e9)])
def test_presets_on_the_meta_device(preset: str, least: float, most: float) -> None:
    with torch.device("meta"):
        model = build(preset)
        assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)
    assert all(p.is_meta for p in model.parameters())
    assert least < sum(p.numel() for p in model.parameters()) < most
    assert tuple(SHAPES) == demo.PRESETS


def test_model_is_causal() -> None:
    torch.manual_seed(0)
    model = build(Shape(width=32, layers=2, heads=2, ffn=64, sequence=16))
    x = torch.randint(0, 256, (2, 16))
    y = x.clone()
    y[:, 9:] = 7
    a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(a[:, 9:], b[:, 9:])


def test_positions_reach_the_attention() -> None:
    torch.manual_seed(0)
    model = build(Shape(width=32, layers=1, heads=2, ffn=64, sequence=16)).double()
    x = torch.arange(16).unsqueeze(0)
    swapped = x[:, [1, 0, *range(2, 16)]]
    # one layer of attention without positions would see the same set of earlier bytes
    assert (model(x) - model(swapped))[:, 2:].abs().max() > 1e-6


def test_evaluation_is_the_mean_over_all_windows(text: Path) -> None:
    corpus = data.load(str(text))
    torch.manual_seed(0)
    model = build(Shape(width=32, layers=1, heads=2, ffn=64, sequence=32))
    size = corpus.held_out.numel()
    got = train.evaluate(model, corpus.held_out, 32, 4, size, torch.device("cpu"))
    starts = data.evaluation_starts(size, 32, size)
    x, y = data.windows(corpus.held_out, starts, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()).item()
    assert got == pytest.approx(want, rel=1e-3)
    assert model.training
