"""Two kinds of figure as SVG text: horizontal bars, and a roofline on logarithmic axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, GRID, MUTED = "#1a1a1a", "#dddddd", "#666666"
COLOURS = ("#1769aa", "#c75000", "#2e7d32", "#7b1fa2", "#b58900", "#00838f")


@dataclass(frozen=True)
class Bar:
    label: str
    values: tuple[float | None, ...]  # one for each series
    notes: tuple[str, ...]  # written behind each bar


@dataclass(frozen=True)
class Point:
    label: str
    group: int  # its colour
    x: float
    y: float


def text(
    x: float, y: float, content: str, size: int = 12, anchor: str = "start", colour: str = INK
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' "
        f"fill='{colour}' {FONT}>{escape(content)}</text>"
    )


def line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dash: str = ""
) -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
        f"stroke='{colour}' stroke-width='{width}'{dashes}/>"
    )


def document(width: float, height: float, title: str, parts: list[str]) -> str:
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' "
            f"width='{width:.0f}' height='{height:.0f}' role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>",
            *parts,
            "</svg>\n",
        ]
    )


def bars(title: str, subtitle: str, series: tuple[str, ...], rows: list[Bar], limit: float) -> str:
    """Bars from zero to `limit`, where longer ones are cut; a dashed line stands at one."""
    left = max([120, *(20 + 6.5 * len(bar.label) for bar in rows)])
    right, top, thickness = 250, 92, 11
    group = thickness * len(series) + 9
    width, height = 980, top + group * len(rows) + 40
    scale = (width - left - right) / limit
    parts = [text(14, 24, title, 16), text(14, 42, subtitle, 11, colour=MUTED)]
    x = 14.0
    for name, colour in zip(series, COLOURS, strict=False):
        parts.append(f"<rect x='{x:.0f}' y='54' width='12' height='12' fill='{colour}'/>")
        parts.append(text(x + 17, 64, name))
        x += 34 + 7 * len(name)
    bottom = top + group * len(rows)
    step = 0.5 if limit <= 3 else 1
    for i in range(1, math.floor(limit / step) + 1):
        at = left + i * step * scale
        parts.append(line(at, top - 6, at, bottom, GRID))
        parts.append(text(at, top - 10, f"{i * step:g}", 10, "middle", MUTED))
    for index, bar in enumerate(rows):
        y = top + index * group
        parts.append(text(left - 8, y + thickness * len(series) / 2 + 4, bar.label, 11, "end"))
        for i, (value, note) in enumerate(zip(bar.values, bar.notes, strict=True)):
            if value is None:
                continue
            length, at = min(value, limit) * scale, y + i * thickness
            parts.append(
                f"<rect x='{left}' y='{at:.1f}' width='{length:.1f}' height='{thickness - 1}' "
                f"fill='{COLOURS[i]}'/>"
            )
            mark = "» " if value > limit else ""
            label = f"{mark}{value:.2f} x, {note}"
            parts.append(text(left + length + 4, at + thickness - 2, label, 10))
    parts.append(line(left, top - 6, left, bottom, INK))
    parts.append(line(left + scale, top - 6, left + scale, bottom, INK, 1.2, "4 3"))
    parts.append(text(left + scale, bottom + 16, "floor", 11, "middle"))
    return document(width, height, title, parts)


def roofline(
    title: str,
    subtitle: str,
    roofs: list[tuple[str, float]],  # label, operations a second
    bytes_per_s: tuple[str, float],
    groups: tuple[str, ...],
    points: list[Point],
) -> str:
    """Operations a second against operations per byte, both logarithmic."""
    left, top, width, height, right = 70, 76, 980, 560, 180
    plot_width, plot_height = width - left - right, height - top - 60
    bandwidth = bytes_per_s[1]
    x_low = min(point.x for point in points) / 2
    x_high = max(*(point.x for point in points), roofs[0][1] / bandwidth) * 3
    y_high = roofs[0][1] * 2
    y_low = min(*(point.y for point in points), x_low * bandwidth) / 2

    def px(x: float) -> float:
        return left + plot_width * math.log(x / x_low) / math.log(x_high / x_low)

    def py(y: float) -> float:
        return top + plot_height * (1 - math.log(y / y_low) / math.log(y_high / y_low))

    parts = [text(14, 24, title, 16), text(14, 42, subtitle, 11, colour=MUTED)]
    for power in range(math.ceil(math.log10(x_low)), math.floor(math.log10(x_high)) + 1):
        at = px(10.0**power)
        parts.append(line(at, top, at, top + plot_height, GRID))
        parts.append(text(at, top + plot_height + 16, f"{10.0**power:g}", 10, "middle", MUTED))
    for power in range(math.ceil(math.log10(y_low)), math.floor(math.log10(y_high)) + 1):
        at = py(10.0**power)
        parts.append(line(left, at, left + plot_width, at, GRID))
        parts.append(text(left - 6, at + 4, f"{10.0 ** (power - 12):g}", 10, "end", MUTED))
    knee = roofs[0][1] / bandwidth
    parts.append(line(px(x_low), py(x_low * bandwidth), px(knee), py(roofs[0][1]), INK, 1.5))
    x_label = math.sqrt(knee) / 2  # below the line, where few points are
    parts.append(text(px(x_label) + 12, py(x_label * bandwidth) + 22, bytes_per_s[0], 11))
    for label, flops in roofs:
        start = px(flops / bandwidth)
        parts.append(line(start, py(flops), left + plot_width, py(flops), INK, 1.5))
        parts.append(text(left + plot_width + 6, py(flops) + 4, label, 11))
    parts += _labelled(points, px, py)
    for i, name in enumerate(groups):
        y = top + plot_height - 14 - 18 * (len(groups) - 1 - i)
        x = left + plot_width + 10
        parts.append(f"<circle cx='{x + 4}' cy='{y - 4}' r='4.5' fill='{COLOURS[i]}'/>")
        parts.append(text(x + 14, y, name, 11))
    parts.append(
        text(left + plot_width / 2, height - 20, "FLOPs per byte of the work", 12, "middle")
    )
    parts.append(text(14, top - 14, "TFLOP/s", 11, colour=MUTED))
    return document(width, height, title, parts)


def _labelled(points: list[Point], px, py) -> list[str]:
    """Dots, each with its label to the right or where there is room around it."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []  # left, right, middle of a label or dot
    for point in points:
        taken.append((px(point.x) - 5, px(point.x) + 5, py(point.y)))
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        x, y = px(point.x), py(point.y)
        parts.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{COLOURS[point.group]}' "
            "fill-opacity='0.85'/>"
        )
        width = 6.0 * len(point.label)
        for dx, dy in _around(width):
            box = (x + dx, x + dx + width, y + dy - 4)
            if all(box[1] < a or box[0] > b or abs(box[2] - m) > 9 for a, b, m in taken):
                break
        taken.append(box)
        if abs(dy - 4) > 14:
            parts.append(line(x, y, box[0] + width / 2, y + dy - 3, MUTED, 0.5))
        parts.append(text(box[0], y + dy, point.label, 10))
    return parts


def _around(width: float) -> list[tuple[float, float]]:
    """Offsets of a label from its dot, the nearest first."""
    rings = (4, 16, -8, 28, -20, 40, -32, 52, -44, 64, -56, 76, 88, 100, 112, 124)
    return [(dx, dy) for dy in rings for dx in (7, -width - 7, -width / 2)]
