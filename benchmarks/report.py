"""Tables and plots of what train_step.py measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = ("micro-batch", "mode", "way", "ms a step", "spread", "host ms", "GPU ms", "launches", "tokens/s", "against the best BF16", "peak GiB", "of BF16's",
        "loss", "cosine", "counts")  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def text(contents: list[dict[str, Any]]) -> str:
    """All rows as Markdown, a table for each file and each other library, with what was left out and why."""
    parts: list[str] = []
    for content in contents:
        parts += [f"{content['gpu']}, torch {content['torch']}; `{content['command']}`", ""]
        for micro_batch, beside in dict.fromkeys((r["micro_batch"], r["beside"]) for r in content["rows"]):
            rows = [r for r in content["rows"] if (r["micro_batch"], r["beside"]) == (micro_batch, beside)]
            parts += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
            for r in rows:
                tokens = 1e3 * r["micro_batch"] * content["sequence"] / r["ms"]
                cells = (
                    r["micro_batch"], r["mode"], r["way"], f"{r['ms']:.1f}", f"{r['spread_ms'][0]:.1f}–{r['spread_ms'][1]:.1f}", f"{r['host']:.1f}",
                    _number(r["gpu"], 1), _number(r["launches"], 0), f"{tokens:.0f}", f"{r['over_best_bf16']:.2f}", _number(r["peak_gib"], 1),
                    _number(r["peak_over_bf16"], 2), f"{r['loss'][0]:.2f} → {r['loss'][1]:.4f}", f"{r['gradient_cosine']:.4f}",
                    "yes" if r["counts"] else f"does not count: {r['reason']}",
                )  # fmt: skip
                parts.append("| " + " | ".join(map(str, cells)) + " |")
            parts += ["", f"Losses: mean of the first and of the last batches of {rows[0]['learn_steps']} steps from the same weights. Peak: of that mode alone; "
                      f"against BF16 in way {rows[0]['peak_against']}.", ""]  # fmt: skip
        parts += [f"- {note}" for note in content["notes"]] + [""]
    return "\n".join(parts)


def plot(contents: list[dict[str, Any]], path: Path) -> None:
    """Bars of speed against the best BF16, one panel a micro-batch; rows that do not count are hatched. A line instead where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"no plot: matplotlib is not installed; `--summary` makes it later, from the JSON files beside {path}", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for content in contents for r in content["rows"] if not (r["mode"] == "bf16" and r["beside"])]
    sizes = sorted({r["micro_batch"] for r in rows})
    if not rows:
        return
    figure, axes = plt.subplots(1, len(sizes), figsize=(7 * len(sizes), 4.5), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        here = [r for r in rows if r["micro_batch"] == size]
        colors = {mode: f"C{i}" for i, mode in enumerate(dict.fromkeys(r["mode"] for r in rows))}
        at = range(len(here))
        axis.bar(
            at, [r["over_best_bf16"] for r in here], color=[colors[r["mode"]] for r in here], hatch=["" if r["counts"] else "//" for r in here], edgecolor="white"
        )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(list(at), [f"{r['mode']}\n{r['way']}" for r in here], fontsize=7)
        axis.set_ylabel("speed against the best BF16 of the same run")
        axis.set_title(f"micro-batch {size}" + ("" if all(r["counts"] for r in here) else " (hatched: does not count)"))
    figure.suptitle(contents[0]["gpu"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def summary(out: Path) -> int:
    """One table and one plot of all files in `out`. Exit code: 0 if there are any and every row counts."""
    files = sorted(out.glob("train_step-*.json"))
    contents = [json.loads(f.read_text()) for f in files]
    if not contents:
        print(f"no train_step-*.json in {out}", file=sys.stderr)
        return 1
    whole = text(contents)
    print(whole)
    (out / "train_step.md").write_text(whole + "\n")
    plot(contents, out / "train_step.png")
    return 0 if all(r["counts"] for content in contents for r in content["rows"]) else 1
