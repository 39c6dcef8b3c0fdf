"""Timelines as one self-contained HTML page: it loads nothing, and shows other people's text as text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.files import write_atomically
from autotune.printable import one_line
from autotune.record import Phase
from autotune.report.timeline import Point, Timeline, timelines

if TYPE_CHECKING:
    import plotly.graph_objects as go

PANEL_HEIGHT, GAP_HEIGHT, MARGIN_TOP, MARGIN_BOTTOM = 260, 80, 90, 80
"""Pixels of each of a run's two panels, between panels, above the first and below the last."""
RATIO_TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
_HINT = "Give a file in a directory that exists and that you may write to."
_PHASES = {
    Phase.BASELINE: ("baseline", "#9e9e9e"),
    Phase.SEARCH: ("search", "#4a90d9"),
    Phase.CONFIRM: ("confirmation", "#5aa469"),
    Phase.SOAK: ("watch", "#f2a541"),
}
_DISTURBED = {
    False: ("undisturbed", "#2b4c7e", "circle"),
    True: ("left out: others took more or less than usual", "#c0392b", "x"),
}
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body style="margin: 0; font-family: sans-serif">
{body}
</body>
</html>
"""


def plot_history(*runs: str | Path, path: str | Path) -> int:
    """Write a page of `timelines`, and return how many runs it shows. A file at `path` is replaced whole or stays."""
    drawn = timelines(*runs)
    write_atomically(Path(path), page(drawn), hint=_HINT)
    return len(drawn)


def page(drawn: Sequence[Timeline]) -> str:
    """The page's text."""
    title = "Speed over time: " + ", ".join(_name(each) for each in drawn)
    body = figure(drawn).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False})
    return _PAGE.format(title=title, body=body)


def figure(drawn: Sequence[Timeline]) -> go.Figure:
    """Two panels for each run, one above the other: the reference's speed, the pairs' ratios."""
    from plotly.subplots import make_subplots

    rows = 2 * len(drawn)
    plotted = rows * PANEL_HEIGHT + (rows - 1) * GAP_HEIGHT
    panels = ("the reference's own speed", "candidates, relative to it, pair by pair")
    drawing = make_subplots(
        rows=rows,
        cols=1,
        subplot_titles=[f"{_name(each)}: {panel}" for each in drawn for panel in panels],
        vertical_spacing=GAP_HEIGHT / plotted,
    )
    for place, each in enumerate(drawn):
        speeds, ratios = 2 * place + 1, 2 * place + 2
        _add_points(drawing, each.reference, row=speeds, unit="{:,.0f} samples/s")
        _add_points(drawing, each.ratios, row=ratios, unit="×{:.3f}")
        drawing.add_hline(y=1.0, line={"width": 1, "color": "#444444"}, row=ratios, col=1)
        for row in (speeds, ratios):
            _add_phases(drawing, each, row=row)
        of_speeds = "x" if speeds == 1 else f"x{speeds}"
        drawing.update_xaxes(title_text="seconds since the run began", matches=of_speeds, row=ratios, col=1)
        drawing.update_yaxes(title_text="samples/s", rangemode="tozero", row=speeds, col=1)
        drawing.update_yaxes(
            title_text="times the reference", type="log", tickvals=RATIO_TICKS, row=ratios, col=1
        )
    drawing.update_layout(
        template="plotly_white",
        height=plotted + MARGIN_TOP + MARGIN_BOTTOM,
        margin={"t": MARGIN_TOP, "b": MARGIN_BOTTOM},
        legend={"orientation": "h", "yanchor": "top", "y": 1.0, "yref": "container", "x": 0.0},
    )
    return drawing


def _add_points(drawing: go.Figure, points: Sequence[Point], *, row: int, unit: str) -> None:
    """One trace for each kind of mark, so that the legend explains it; it names each kind once for all panels."""
    for disturbed, (name, colour, symbol) in _DISTURBED.items():
        of_kind = [each for each in points if each.disturbed is disturbed]
        named = any(trace.name == name for trace in drawing.data)
        if of_kind:
            drawing.add_scatter(
                x=[each.at for each in of_kind],
                y=[each.value for each in of_kind],
                text=[_hover(each, unit) for each in of_kind],
                hoverinfo="text",
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 9 if disturbed else 6},
                name=name,
                legendgroup=name,
                showlegend=not named,
                row=row,
                col=1,
            )


def _add_phases(drawing: go.Figure, timeline: Timeline, *, row: int) -> None:
    for place, span in enumerate(timeline.phases):
        name, colour = _PHASES[span.phase]
        drawing.add_vrect(
            x0=span.begins,
            x1=span.ends,
            fillcolor=colour,
            opacity=0.12,
            line_width=0,
            layer="below",
            annotation={"text": name, "font": {"size": 11}},
            annotation_position="top left" if place % 2 else "bottom left",  # neighbours may be narrow
            row=row,
            col=1,
        )


def _hover(point: Point, unit: str) -> str:
    lines = [
        f"{unit.format(point.value)} at {point.at:.1f} s",
        f"trial {point.trial}, {_PHASES[point.phase][0]}: {_safe(point.configuration)}",
    ]
    if point.load is not None:
        lines.append(f"others took {point.load:.0%} of the machine")
    if point.disturbed:
        lines.append(_DISTURBED[True][0])
    return "<br>".join(lines)


def _name(timeline: Timeline) -> str:
    return _safe(f"{timeline.workload} {timeline.run}" if timeline.workload else timeline.run)


def _safe(text: str) -> str:
    """Others' text as text: plotly draws a few tags, links among them."""
    return html.escape(one_line(text))
