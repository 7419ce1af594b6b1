"""Bytes written a day against what a drive is rated for."""

from __future__ import annotations

from dataclasses import dataclass

_DAY_S = 86_400
_YEAR_DAYS = 365


@dataclass(frozen=True, slots=True)
class Rating:
    """What all drives of a node together are rated for, in bytes written over their lives."""

    lifetime_nbytes: float

    @classmethod
    def of_tbw(cls, terabytes: float, drives: int) -> Rating:
        """From "terabytes written" of one drive (1e12 bytes)."""
        return cls(terabytes * 1e12 * drives)

    @classmethod
    def of_dwpd(
        cls, writes_a_day: float, capacity_nbytes: int, years: float, drives: int
    ) -> Rating:
        """From "drive writes per day" over the years of the warranty."""
        return cls(writes_a_day * capacity_nbytes * years * _YEAR_DAYS * drives)


@dataclass(frozen=True, slots=True)
class Wear:
    """Of a node's drives while training goes on without a pause. `lifetime_days`: until they have
    written what they are rated for; None without a rating."""

    write_nbytes_per_day: float
    lifetime_days: float | None


def wear(write_nbytes: int, step_s: float, *, ranks: int, rating: Rating | None) -> Wear:
    """`write_nbytes`: of one rank in a step of `step_s`; `ranks`: on one node."""
    a_day = write_nbytes * ranks * _DAY_S / step_s if step_s else 0.0
    lifetime = rating.lifetime_nbytes / a_day if rating is not None and a_day else None
    return Wear(a_day, lifetime)
