"""What happened when: spans on named tracks, as a trace for Perfetto and as a picture.

A track is a row; spans of one track may overlap (several reads are under way at a time). Perfetto
and chrome://tracing open the JSON, which is in the trace-event format.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nvmeswap.errors import SwapUsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROCESS = 1
_ROW_HEIGHT = 0.8
_COLOURS = {
    "read": "tab:blue", "update": "tab:green", "write": "tab:orange", "wait": "tab:red",
}


class Span(NamedTuple):
    """Something that took a while, in `time.perf_counter` seconds."""

    track: str
    name: str
    began_s: float
    ended_s: float


class Timeline:
    """Spans of what a program did, kept in memory until they are written out.

        timeline = Timeline()
        began_s = time.perf_counter()
        ...
        timeline.add("update", "sub_group.3", began_s, time.perf_counter())
        timeline.write_perfetto(Path("step.json"))
        timeline.draw(Path("step.png"))

    Blocking: `write_perfetto` and `draw`, for as long as writing takes. Threads: any; `add` takes
    about a microsecond.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, track: str, name: str, began_s: float, ended_s: float) -> None:
        """Note a span, in `time.perf_counter` seconds. Of any order, overlapping or not."""
        span = Span(track, name, began_s, ended_s)
        with self._lock:
            self._spans.append(span)

    def spans(self) -> list[Span]:
        """A copy of all, in the order they were added."""
        with self._lock:
            return list(self._spans)

    def write_perfetto(self, path: Path) -> None:
        """Write a JSON trace. Times begin at the first span's beginning. Overlapping spans of a
        track lie on rows of their own, since a row shows only spans that nest."""
        path.write_text(json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"}) + "\n")

    def draw(self, path: Path) -> None:
        """Draw a PNG, one row a track; overlapping spans share it. The rows are read, update,
        write, wait, and others in the order of their first spans. Raises SwapUsageError where
        matplotlib is missing."""
        require_matplotlib()
        from matplotlib.figure import Figure

        spans = self.spans()
        tracks = _tracks(spans)
        figure = Figure(figsize=(14, 1.0 + 0.6 * max(1, len(tracks))), dpi=120,
                        layout="constrained")
        _draw_rows(figure.subplots(), spans, tracks)
        figure.savefig(path, format="png")

    def _events(self) -> list[dict[str, Any]]:
        spans = self.spans()
        zero_s = min((span.began_s for span in spans), default=0.0)
        events: list[dict[str, Any]] = []
        row = 0
        for track in _tracks(spans):
            for number, row_spans in enumerate(_rows([s for s in spans if s.track == track])):
                row += 1
                name = track if number == 0 else f"{track} {number + 1}"
                events.append({"ph": "M", "pid": _PROCESS, "tid": row, "name": "thread_name",
                               "args": {"name": name}})
                events.append({"ph": "M", "pid": _PROCESS, "tid": row, "name": "thread_sort_index",
                               "args": {"sort_index": row}})
                events += [
                    {"ph": "X", "pid": _PROCESS, "tid": row, "cat": track, "name": span.name,
                     "ts": (span.began_s - zero_s) * 1e6,
                     "dur": (span.ended_s - span.began_s) * 1e6}
                    for span in row_spans
                ]
        return events


def require_matplotlib() -> None:
    """Raises SwapUsageError, with the line that installs it, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SwapUsageError(
            "pictures are drawn by matplotlib, which is not installed",
            fix="pip install 'nvmeswap[bench]', or ask for no picture (--no-png)",
        ) from error


def _tracks(spans: Sequence[Span]) -> list[str]:
    """Those of a pipeline in its order, then others in the order of their first spans."""
    met = dict.fromkeys(span.track for span in spans)
    return [track for track in _COLOURS if track in met] + [
        track for track in met if track not in _COLOURS
    ]


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans on as few rows as it takes for none to overlap another on its row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: each.began_s):
        free = next((row for row in rows if row[-1].ended_s <= span.began_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _draw_rows(axes: Axes, spans: Sequence[Span], tracks: Sequence[str]) -> None:
    zero_s = min((span.began_s for span in spans), default=0.0)
    for place, track in enumerate(tracks):
        bars = [
            (span.began_s - zero_s, span.ended_s - span.began_s)
            for span in spans
            if span.track == track
        ]
        axes.broken_barh(bars, (place - _ROW_HEIGHT / 2, _ROW_HEIGHT), alpha=0.5,
                         facecolor=_COLOURS.get(track, "tab:gray"), edgecolor="black",
                         linewidth=0.4)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_ylim(max(1, len(tracks)) - 0.5, -0.5)  # the first track on top
    axes.set_xlim(left=0)
    axes.set_xlabel("s")
