"""A timeline tells what was added to it: as a trace that Perfetto opens, and as a picture."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.timeline import Timeline

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def timeline() -> Timeline:
    """Two steps of two sub-groups; the reads overlap."""
    made = Timeline()
    for step in range(2):
        zero_s = 1000.0 + step
        made.add("read", "sub_group.0", zero_s + 0.0, zero_s + 0.2)
        made.add("read", "sub_group.1", zero_s + 0.1, zero_s + 0.3)
        made.add("wait", "sub_group.0", zero_s + 0.0, zero_s + 0.2)
        made.add("update", "sub_group.0", zero_s + 0.2, zero_s + 0.3)
        made.add("write", "sub_group.0", zero_s + 0.3, zero_s + 0.5)
    return made


def read_trace(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Names of the rows, by number, and the spans."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return names, [event for event in events if event["ph"] == "X"]


def test_trace_has_every_span_on_its_track(timeline: Timeline, tmp_path: Path) -> None:
    timeline.write_perfetto(tmp_path / "trace.json")
    names, events = read_trace(tmp_path / "trace.json")
    assert len(events) == 10
    assert {event["cat"] for event in events} == {"read", "update", "write", "wait"}
    assert all(names[event["tid"]].startswith(event["cat"]) for event in events)
    update = next(event for event in events if event["cat"] == "update")
    assert update["name"] == "sub_group.0"
    assert update["ts"] == pytest.approx(0.2e6) and update["dur"] == pytest.approx(0.1e6)


def test_trace_never_overlaps_spans_on_a_row(timeline: Timeline, tmp_path: Path) -> None:
    """A viewer draws the one that began later inside the other."""
    timeline.write_perfetto(tmp_path / "trace.json")
    names, events = read_trace(tmp_path / "trace.json")
    assert set(names.values()) == {"read", "read 2", "wait", "update", "write"}
    for row in names:
        ends = 0.0
        for event in sorted((e for e in events if e["tid"] == row), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-3
            ends = event["ts"] + event["dur"]


def test_empty_timeline_is_a_trace_without_spans(tmp_path: Path) -> None:
    Timeline().write_perfetto(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == ({}, [])
    Timeline().draw(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG_MAGIC)


def test_picture_is_drawn(timeline: Timeline, tmp_path: Path) -> None:
    timeline.draw(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(PNG_MAGIC)


def test_spans_of_many_threads_are_all_kept() -> None:
    timeline = Timeline()

    def add() -> None:
        for number in range(1000):
            timeline.add("update", str(number), number, number + 1)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans()) == 8000
