"""Draws a `dense_cpu` record as bars: `python -m benchmarks.plot RECORD.json OUT.svg`."""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

from benchmarks.peers.protocol import median

ROW, BAR, LEFT, WIDTH, GAP = 22, 15, 150, 250, 24
OURS, THEIRS, INK, PAPER = "#2563eb", "#a8b0bd", "#1f2937", "#ffffff"
PANEL = LEFT + WIDTH + 60


def panel(case: str, rates: dict[str, float], x: int, y: int) -> list[str]:
    best = max(rates.values())
    parts = [f'<text x="{x}" y="{y}" font-weight="600">{escape(case)}, tok/s</text>']
    for index, (name, rate) in enumerate(sorted(rates.items(), key=lambda item: -item[1])):
        top = y + 10 + index * ROW
        width = max(2, round(WIDTH * rate / best))
        colour = OURS if name.startswith("coterie") else THEIRS
        middle = top + BAR - 3
        parts += [
            f'<text x="{x + LEFT - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{x + LEFT}" y="{top}" width="{width}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{x + LEFT + width + 6}" y="{middle}">{rate:,.0f}</text>',
        ]
    return parts


def draw(record: dict[str, dict[str, dict[str, list[float]]]], cases: list[str]) -> str:
    measured = {name: rates for name, rates in record["systems"].items() if isinstance(rates, dict)}
    rows = len(measured)
    panel_height = rows * ROW + 50
    columns = 2
    height = -(-len(cases) // columns) * panel_height + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * PANEL + GAP}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    for index, case in enumerate(cases):
        rates = {name: median(r[case]) for name, r in measured.items() if r.get(case)}
        x = GAP + index % columns * PANEL
        parts += panel(case, rates, x, 28 + index // columns * panel_height)
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text())
    cases = sorted({case for r in record["systems"].values() if isinstance(r, dict) for case in r})
    arguments.out.write_text(draw(record, cases))


if __name__ == "__main__":
    main()
