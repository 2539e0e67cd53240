"""The demo's text: what is held out, which batch comes when, and what is said of data that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ampplug.demo import DemoError, data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty different files of 100 to 400 bytes, two of them in places that are skipped, one a copy."""
    root = tmp_path / "text"
    for i in range(60):
        file = root / f"part{i % 5}" / f"file{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((f"<{i}>".encode() * 100)[: 100 + 5 * i])
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "cached.py").write_text("skipped" * 100)
    (root / "copy.py").write_bytes((root / "part0" / "file0.py").read_bytes())
    return root


def test_no_file_is_in_both_parts(folder: Path) -> None:
    corpus = data.load(str(folder))
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert len(corpus.train_files) + len(corpus.held_out_files) == 60  # neither the cached file nor the copy
    total = corpus.train.numel() + corpus.held_out.numel()
    assert 0.10 <= corpus.held_out.numel() / total <= 0.15
    held_out = corpus.held_out.numpy().tobytes()
    assert held_out == b"".join((folder / f).read_bytes() for f in corpus.held_out_files)
    assert not any((folder / f).read_bytes() in held_out for f in corpus.train_files)


def test_split_is_the_same_wherever_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    first = data.load(str(folder))
    moved = tmp_path / "moved" / "elsewhere"
    moved.parent.mkdir()
    folder.rename(moved)
    second = data.load(str(moved))
    assert first.fingerprint == second.fingerprint
    assert first.held_out_files == second.held_out_files
    (moved / "part1" / "file1.py").write_bytes(b"other")
    assert data.load(str(moved)).fingerprint != first.fingerprint


def test_standard_library_is_the_default() -> None:
    corpus = data.load(None)
    assert corpus.held_out.numel() >= 1_000_000
    files = corpus.train_files + corpus.held_out_files
    assert "argparse.py" in files
    assert all(f.endswith(".py") and "site-packages" not in f and "__pycache__" not in f for f in files)
    assert not set(corpus.train_files) & set(corpus.held_out_files)


def test_few_large_files_still_give_two_parts(tmp_path: Path) -> None:
    for name, size in (("a", 5000), ("b", 3000), ("c", 4000)):
        (tmp_path / name).write_bytes(name.encode() * size)
    corpus = data.load(str(tmp_path))
    assert corpus.held_out_files == ("b",)
    assert corpus.train_files == ("a", "c")


def test_single_file_holds_its_end_out(tmp_path: Path) -> None:
    text = bytes(range(1, 251)) * 40
    (tmp_path / "text").write_bytes(text)
    corpus = data.load(str(tmp_path / "text"))
    assert corpus.train.numpy().tobytes() == text[:9000]
    assert corpus.held_out.numpy().tobytes() == text[9000:]
    assert data.load(str(tmp_path)).fingerprint == corpus.fingerprint  # a folder of one file


def test_batches_depend_on_seed_and_step_only() -> None:
    table = data.offsets(3, range(20), 4, 1000, 16)
    assert table.shape == (20, 4)
    torch.manual_seed(1)
    later = data.offsets(3, range(7, 9), 4, 1000, 16)
    assert torch.equal(later, table[7:9])
    assert not torch.equal(data.offsets(4, range(20), 4, 1000, 16), table)
    assert len({tuple(row) for row in table.tolist()}) == 20
    assert torch.equal(data.offsets(3, range(20), 2, 1000, 16), table[:, :2])


def test_windows_stay_inside_and_targets_are_one_ahead() -> None:
    text = torch.arange(17, dtype=torch.uint8)
    starts = data.offsets(0, range(50), 4, 17, 16).flatten()
    assert starts.unique().tolist() == [0]
    x, y = data.windows(text, starts[:2], 16)
    assert x.tolist() == [list(range(16))] * 2
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("limit, count", [(1, 1), (40, 4), (10**9, 9)])
def test_evaluation_windows_do_not_overlap(limit: int, count: int) -> None:
    starts = data.evaluation_starts(100, 11, limit)
    assert starts.numel() == count
    assert starts.diff().min() >= 11 if count > 1 else True
    assert starts.max() + 11 + 1 <= 100


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nowhere' does not exist"):
        data.load(str(tmp_path / "nowhere"))


def test_empty_data(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="is empty: no file with text"):
        data.load(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(DemoError, match="is empty"):
        data.load(str(tmp_path / "empty"))


def test_unreadable_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"x" * 100)

    def refuse(self: Path, mode: str) -> None:  # permissions do not bind the root user, who may run this
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(DemoError, match=r"cannot read '.*text': Permission denied"):
            data.load(str(path))


@pytest.mark.parametrize("path, said", [("", "empty path"), ("x" * 300, "File name too long"), ("a\0b", "null")], ids=["empty", "long", "null"])
def test_paths_that_cannot_be(path: str, said: str) -> None:
    with pytest.raises(DemoError, match=said):
        data.load(path)


def test_folder_that_cannot_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:  # as for a path below a folder without permission
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DemoError, match="Permission denied"):
        data.load(str(tmp_path / "private" / "text"))


def test_only_regular_text_files_are_read(folder: Path) -> None:
    """A pipe without a writer would be waited for without end."""
    before = data.load(str(folder)).fingerprint
    os.mkfifo(folder / "pipe.py")
    (folder / "lost.py").symlink_to("nowhere")
    (folder / "library.py").write_bytes(b"\x7fELF\0\0" * 1000)
    assert data.load(str(folder)).fingerprint == before


def test_file_that_shrinks_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are read first, texts then. expect: an error, not zeros to learn from."""
    digest = data._digest
    monkeypatch.setattr(data, "_digest", lambda path: (digest(path)[0] + 1, digest(path)[1]))
    with pytest.raises(DemoError, match="became shorter while it was read"):
        data.load(str(folder))


def test_small_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 100)
    corpus = data.load(str(tmp_path / "text"))
    corpus.require(9)
    with pytest.raises(DemoError, match="too small: its held-out part has 10 bytes, a sequence of 10 needs 11"):
        corpus.require(10)
