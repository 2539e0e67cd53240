"""Real text as bytes: what is learned, what is held out, and which batch comes at which step."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ampplug.demo import DemoError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_HELD_OUT, _HELD_OUT_MOST = 0.10, 0.15  # of the bytes: at least, and at most where files allow it


@dataclass(frozen=True)
class Corpus:
    """A text in two parts that share no file (or, of a single file, no byte)."""

    name: str
    train: Tensor  # uint8 [bytes]
    held_out: Tensor  # uint8 [bytes]
    train_files: tuple[str, ...]  # relative paths, in order
    held_out_files: tuple[str, ...]
    fingerprint: str  # of both parts

    def require(self, sequence: int) -> None:
        """DemoError unless both parts hold at least one window of `sequence` bytes and the byte after it."""
        for part, data in (("training", self.train), ("held-out", self.held_out)):
            if data.numel() < sequence + 1:
                raise DemoError(f"data {self.name!r} is too small: its {part} part has {data.numel()} bytes, a sequence of {sequence} needs {sequence + 1}")


def load(path: str | None) -> Corpus:
    """The text at `path`, a file or folder; None: the sources of the standard library that runs this."""
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return _split_files("stdlib", folder, _list_files(folder, ".py"))
    if not path:  # Path("") would be the current folder
        raise DemoError("data '' is an empty path; give a file or folder")
    root = Path(path)
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except FileNotFoundError as error:
        raise DemoError(f"data {path!r} does not exist") from error
    except (OSError, ValueError) as error:  # a folder above that cannot be entered, a name too long, a null byte
        raise DemoError(f"cannot read data {path!r}: {getattr(error, 'strerror', None) or error}") from error
    return _split_files(path, root, _list_files(root, "")) if is_folder else _split_positions(path, root)


def _list_files(folder: Path, suffix: str) -> list[str]:
    """Relative paths of the visible regular files with this suffix, sorted, the same on every file system.

    Pipes and sockets, which would be waited for, links that lead nowhere and binary files are left out.
    """

    def refuse(error: OSError) -> None:
        raise DemoError(f"cannot read {error.filename!r}: {error.strerror}")

    found = []
    for here, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for f in files:
            path = Path(here, f)
            if f.endswith(suffix) and not f.startswith(".") and path.is_file() and _is_text(path):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def _is_text(path: Path) -> bool:
    """No null byte in its beginning: what grep and git go by. Libraries and pictures beside text would be most of the bytes."""
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(8192)
    except OSError:
        return True  # reading it says why


def _digest(path: Path) -> tuple[int, bytes]:
    """(bytes, SHA-256) of a file, which need not fit into memory beside others."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    return size, digest.digest()


def _read(root: Path, files: tuple[str, ...], sizes: dict[str, int]) -> bytearray:
    """These files, one after the other. Nothing is copied: texts may be large."""
    text = bytearray(sum(sizes[f] for f in files))
    position = 0
    for f in files:
        try:
            with (root / f).open("rb") as file, memoryview(text)[position : position + sizes[f]] as part:
                position += file.readinto(part)  # type: ignore[attr-defined]
        except OSError as error:
            raise _unreadable(root / f, error) from error
    if position != len(text):
        raise DemoError(f"a file in {str(root)!r} became shorter while it was read; give data that nothing else writes to")
    return text


def _unreadable(path: Path, error: OSError) -> DemoError:
    return DemoError(f"cannot read {str(path)!r}: {error.strerror or error}")


def _split_files(name: str, root: Path, files: list[str]) -> Corpus:
    """Whole files are held out, in the order of a hash of their paths, until a tenth of the bytes is."""
    sizes: dict[str, int] = {}
    seen: set[bytes] = set()
    for file in files:
        size, digest = _digest(root / file)
        if size and digest not in seen:  # a copy of a training file would not be held out
            seen.add(digest)
            sizes[file] = size
    if not sizes:
        raise DemoError(f"data {name!r} is empty: no file with text in {str(root)!r}")
    if len(sizes) == 1:
        return _split_positions(name, root / next(iter(sizes)))
    total = sum(sizes.values())
    held: set[str] = set()
    size = 0
    for file in sorted(sizes, key=lambda f: hashlib.sha256(f.encode("utf-8", "surrogateescape")).digest()):
        if size >= _HELD_OUT * total:
            break
        if size + sizes[file] <= _HELD_OUT_MOST * total:
            held.add(file)
            size += sizes[file]
    if not held:  # few and large files
        held.add(min(sizes, key=lambda f: (sizes[f], f)))
    train = tuple(f for f in sizes if f not in held)
    rest = tuple(f for f in sizes if f in held)
    return _corpus(name, memoryview(_read(root, train, sizes)), memoryview(_read(root, rest, sizes)), train, rest)


def _split_positions(name: str, path: Path) -> Corpus:
    """The last tenth is held out."""
    size, _ = _digest(path)
    if not size:
        raise DemoError(f"data {name!r} is empty")
    content = memoryview(_read(path.parent, (path.name,), {path.name: size}))
    cut = size - int(size * _HELD_OUT)
    return _corpus(name, content[:cut], content[cut:], (), ())


def _corpus(name: str, train: memoryview, held_out: memoryview, train_files: tuple[str, ...], held_out_files: tuple[str, ...]) -> Corpus:
    fingerprint = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(held_out).digest()).hexdigest()
    return Corpus(name, _tensor(train), _tensor(held_out), train_files, held_out_files, fingerprint)


def _tensor(content: memoryview) -> Tensor:
    """The same memory."""
    return torch.frombuffer(content, dtype=torch.uint8) if content.nbytes else torch.zeros(0, dtype=torch.uint8)


def offsets(seed: int, steps: range, batch: int, size: int, sequence: int) -> Tensor:
    """Where the windows of these steps start in `size` bytes: int64 [steps, batch].

    A row depends on the seed and its step alone: not on what was drawn before, on the device, or on a library's generator.
    """
    starts = size - sequence
    rows = []
    for step in steps:
        digests = (hashlib.blake2b(f"{seed}/{step}/{i}".encode(), digest_size=8).digest() for i in range(batch))
        rows.append([int.from_bytes(d, "little") % starts for d in digests])
    return torch.tensor(rows, dtype=torch.int64).view(len(steps), batch)


def windows(data: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [batch, sequence] each, of the windows at `starts` [batch]; targets are one byte ahead."""
    index = starts.unsqueeze(1) + torch.arange(sequence + 1, device=starts.device)
    taken = data[index].long()
    return taken[:, :-1], taken[:, 1:]


def evaluation_starts(size: int, sequence: int, limit: int) -> Tensor:
    """Starts of windows that do not overlap and cover about `limit` bytes, evenly spread over `size` bytes: int64 [windows]."""
    available = (size - 1) // sequence
    chosen = min(available, max(1, -(-limit // sequence)))
    return torch.tensor([i * available // chosen * sequence for i in range(chosen)], dtype=torch.int64)
