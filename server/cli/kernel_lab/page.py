"""The report as one HTML page: a roofline plot per chip, shares by context, every figure.

Owns markup and drawing; self-contained, without scripts or anything from elsewhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kernels.chips import CHIPS, Chip
from server.cli.kernel_lab.compare import name
from server.cli.kernel_lab.rows import Row
from server.cli.kernel_lab.terminal import SHOWN_CONTEXTS, SHOWN_SLOTS, STATIC

WIDTH, HEIGHT, MARGIN = 720, 400, 56
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px }
th, td { padding: 2px 8px; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
svg { background: #fff; color: #222; max-width: 100% }
.scroll { overflow-x: auto }
"""


@dataclass(frozen=True, slots=True)
class Axes:
    """A frame from `low` to `high` on either axis, logarithmic but for a y axis from 0."""

    low: tuple[float, float]
    high: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the picture; points outside lie on the frame."""
        right = _place(x, self.low[0], self.high[0]) * (WIDTH - 2 * MARGIN)
        up = _place(y, self.low[1], self.high[1]) * (HEIGHT - 2 * MARGIN)
        return MARGIN + right, HEIGHT - MARGIN - up


def _place(value: float, low: float, high: float) -> float:
    if low == 0:
        return max(0.0, min(1.0, value / high))
    return min(1.0, math.log(max(value, low) / low) / math.log(high / low))


def report_page(rows: Sequence[Row]) -> str:
    """The whole page."""
    chips = [chip for chip in CHIPS if any(row["chip"] == chip for row in rows)]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<title>Predicted speed of TPU kernels</title>",
        f"<style>{STYLE}</style></head><body><h1>Predicted speed of TPU kernels</h1>",
        f"<p>{html.escape(STATIC)}</p>",
    ]
    for chip in chips:
        of_chip = [row for row in rows if row["chip"] == chip]
        parts += [f"<h2>{chip}</h2>", _roofline(CHIPS[chip], of_chip), _by_context(of_chip)]
        parts += ["<div class='scroll'>", _table(of_chip), "</div>"]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _roofline(chip: Chip, rows: Sequence[Row]) -> str:
    """FLOP per HBM byte against predicted FLOP/s, below the chip's two roofs."""
    axes = Axes((1.0, chip.bf16_flops / 1e4), (1e4, chip.bf16_flops * 1.5))
    ridge = chip.bf16_flops / chip.hbm_bytes_per_s
    roof = [(1.0, chip.hbm_bytes_per_s), (ridge, chip.bf16_flops), (1e4, chip.bf16_flops)]
    parts = [_frame("FLOP per byte of HBM", "predicted FLOP/s"), _line(axes, roof, "#222")]
    for tick in (1, 10, 100, 1000, 10000):
        x, y = axes.at(tick, axes.low[1])
        parts.append(_text(x, y + 16, str(tick)))
    for share in (1.0, 0.1, 0.01, 0.001):
        x, y = axes.at(1.0, chip.bf16_flops * share)
        parts.append(_text(x - 6, y + 4, f"{chip.bf16_flops * share / 1e12:.3g} T", "end"))
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        for label, intensity, flops in _points(chip, row):
            x, y = axes.at(intensity, flops)
            title = html.escape(f"{name(row)}{label}: {flops / 1e12:.3g} TFLOP/s")
            parts.append(
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}' fill-opacity='.7'>"
                f"<title>{title}</title></circle>"
            )
    return _svg(f"Roofline of one {chip.name} core", parts) + _legend(map(name, rows))


def _points(chip: Chip, row: Row) -> Iterator[tuple[str, float, float]]:
    """Label, FLOP per byte and predicted FLOP/s: per context of a decode step, once of a mixed."""
    if row["phase"] == "mixed":
        share = row["useful_flop_share_with_edges"]["4096"]
        yield " behind 4096", row["flops_per_byte"], share * chip.bf16_flops
        return
    for context in ("256", "1024", "8192"):
        share = cast("dict[str, float]", row["roofline_share"]).get(context)
        if share is not None:
            roof = min(chip.bf16_flops, row["flops_per_byte"] * chip.hbm_bytes_per_s)
            yield f" at {context} tokens", row["flops_per_byte"], share * roof


def _by_context(rows: Sequence[Row]) -> str:
    """Share of the roofline by context length, solid by slots, dashed with latencies."""
    axes = Axes((128.0, 0.0), (8192.0, 1.05))
    parts = [_frame("context (tokens)", "share of the roofline")]
    for tick in (128, 256, 512, 1024, 2048, 4096, 8192):
        x, y = axes.at(tick, axes.low[1])
        parts.append(_text(x, y + 16, str(tick)))
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = axes.at(128.0, tick)
        parts.append(_text(x - 6, y + 4, f"{100 * tick:.0f} %", "end"))
    decodes = [row for row in rows if row["phase"] == "decode"]
    for number, row in enumerate(decodes):
        colour = COLOURS[number % len(COLOURS)]
        for key, dash in (("roofline_share", ""), ("scheduled_roofline_share", "5 4")):
            points = [(float(context), share) for context, share in row[key].items()]
            if points:
                parts.append(_line(axes, points, colour, dash, name(row)))
    title = "Decode: share of the HBM roofline (dashed: with latencies)"
    return _svg(title, parts) + _legend(map(name, decodes))


def _table(rows: Iterable[Row]) -> str:
    plain = {
        "c": "cycles_per_kv_token_head",
        "all in": "all_in_cycles_per_kv_token_head",
        "with latencies": "scheduled_cycles_per_kv_token_head",
        "HBM": "hbm_cycles",
        "FLOP share": "useful_flop_share",
        "spills": "spills",
        "VMEM bytes": "vmem_bytes",
        "code bytes": "code_bytes",
        "compile s": "compile_s",
        "prologue µs": "prologue_us",
    }
    heads = ["case", *plain, *(f"@{n}" for n in SHOWN_CONTEXTS), *SHOWN_SLOTS]
    lines = ["<table><tr>", *(f"<th>{html.escape(head)}</th>" for head in heads), "</tr>"]
    for row in rows:
        cells = [name(row), *(row.get(key) for key in plain.values())]
        cells += [row["roofline_share"].get(context) for context in SHOWN_CONTEXTS]
        cells += [row["slots"][slot] for slot in SHOWN_SLOTS]
        lines += ["<tr>", *(f"<td>{_cell(cell)}</td>" for cell in cells), "</tr>"]
    return "".join([*lines, "</table>"])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return html.escape(f"{value:g}" if isinstance(value, float) else str(value))


def _svg(title: str, parts: Iterable[str]) -> str:
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' role='img' "
        f"aria-label='{html.escape(title)}' font-size='11'>{''.join(parts)}</svg></figure>"
    )


def _legend(names: Iterable[str]) -> str:
    """Which colour is which case, in the order they were drawn."""
    marks = (
        f"<span style='color:{COLOURS[number % len(COLOURS)]}'>&#9679;</span> {html.escape(text)}"
        for number, text in enumerate(names)
    )
    return f"<p>{'<br>'.join(marks)}</p>"


def _frame(x_title: str, y_title: str) -> str:
    inner = f"width='{WIDTH - 2 * MARGIN}' height='{HEIGHT - 2 * MARGIN}'"
    return (
        f"<rect x='{MARGIN}' y='{MARGIN}' {inner} fill='none' stroke='#8888'/>"
        + _text(WIDTH / 2, HEIGHT - 12, x_title)
        + _text(MARGIN, MARGIN - 12, y_title, "start")
    )


def _line(
    axes: Axes,
    points: Iterable[tuple[float, float]],
    colour: str,
    dash: str = "",
    title: str = "",
) -> str:
    path = " ".join("{:.1f},{:.1f}".format(*axes.at(x, y)) for x, y in points)
    return (
        f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5' "
        f"stroke-dasharray='{dash}'><title>{html.escape(title)}</title></polyline>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    escaped = html.escape(text)
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escaped}</text>"
