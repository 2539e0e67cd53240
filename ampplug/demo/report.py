"""What a finished demo leaves: a table on the screen, `results.json` and `losses.png`."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import ampplug

RESULTS, PLOT = "results.json", "losses.png"


def relative_gap(loss: float, baseline: float) -> float:
    """How much larger a loss is, in percent of the baseline's."""
    return 100 * (loss / baseline - 1)


def table(finished: dict[str, dict[str, Any]]) -> str:
    """Both runs side by side. finished: "bf16" and "ampplug" -> result of a phase."""
    a, b = finished["bf16"], finished["ampplug"]
    rows = [("", "BF16 AdamW", f"ampplug {b['mode'].upper()}", "difference")]
    for name, key in (("train loss (last 20 steps)", "train_loss"), ("held-out loss", "held_out_loss")):
        rows.append((name, f"{a[key]:.4f}", f"{b[key]:.4f}", f"{relative_gap(b[key], a[key]):+.2f} %"))
    for kind in a["bytes_per_parameter"]:
        x, y = a["bytes_per_parameter"][kind], b["bytes_per_parameter"][kind]
        label = "bytes/parameter, total" if kind == "total" else f"bytes/parameter, {kind}"
        rows.append((label, f"{x:.2f}", f"{y:.2f}", f"{y - x:+.2f}"))
    x, y = a["step_seconds"], b["step_seconds"]
    rows.append(("step time, median", f"{1e3 * x:.1f} ms", f"{1e3 * y:.1f} ms", f"{relative_gap(y, x):+.0f} %"))
    x, y = a["tokens_per_second"], b["tokens_per_second"]
    rows.append(("tokens/s", f"{x:.0f}", f"{y:.0f}", f"{relative_gap(y, x):+.0f} %"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware that the numbers were measured on."""
    triton = sys.modules.get("triton")
    return {
        "ampplug": ampplug.__version__,
        "torch": str(torch.__version__),
        "triton": getattr(triton, "__version__", None),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
    }


def write_json(path: Path, content: Any) -> None:
    """Write the whole file or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(out: Path) -> None:
    """Take away what `finish` wrote before."""
    for name in (RESULTS, PLOT):
        (out / name).unlink(missing_ok=True)


def plot(path: Path, curves: dict[str, dict[str, Any]], title: str) -> bool:
    """Loss curves as PNG. curves: label -> {"curve": losses of every step, "held_out_curve": [(step, loss), ...]}. False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"note: matplotlib is not installed; {path} is not drawn (pip install matplotlib)", file=sys.stderr)
        return False
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for i, (label, run) in enumerate(curves.items()):
        losses = run["curve"]
        width = max(1, len(losses) // 50)
        smooth = [sum(losses[max(0, j - width + 1) : j + 1]) / min(width, j + 1) for j in range(len(losses))]
        axes.plot(range(1, len(losses) + 1), smooth, color=f"C{i % 10}", linewidth=1, label=f"{label}, training")
        if run["held_out_curve"]:
            steps, held_out = zip(*run["held_out_curve"], strict=True)
            axes.plot(steps, held_out, "o", color=f"C{i % 10}", markersize=4, label=f"{label}, held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title(title)
    axes.legend(fontsize="small")
    figure.tight_layout()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    pyplot.close(figure)
    return True


def finish(out: Path, settings: dict[str, Any], finished: dict[str, dict[str, Any]], command: str) -> None:
    """Print the table and write the files, each of them whole."""
    results = {
        "environment": environment(settings["device"]),
        "seed": settings["seed"],
        "command": command,
        "settings": settings,
        "runs": finished,
        "relative_gap_percent": {k: relative_gap(finished["ampplug"][k], finished["bf16"][k]) for k in ("train_loss", "held_out_loss")},
    }
    write_json(out / RESULTS, results)
    labels = {"BF16 AdamW": finished["bf16"], f"ampplug {finished['ampplug']['mode'].upper()}": finished["ampplug"]}
    drawn = plot(out / PLOT, labels, f"byte-level GPT, preset {settings['preset']}, seed {settings['seed']}")
    print(f"\n{table(finished)}\n\nwritten: {out / 'results.json'}" + (f", {out / 'losses.png'}" if drawn else ""))
