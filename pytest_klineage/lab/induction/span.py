"""Timing neighbouring steps of a lineage together: those that show no effect alone, and the one that pays."""

from __future__ import annotations

import msgspec

from pytest_klineage.lab.induction.lift_groups import Site
from pytest_klineage.lab.induction.retime import undisturbed
from pytest_klineage.lab.induction.verdicts import Judge
from pytest_klineage.lab.induction.walk import LEAST
from pytest_klineage.records import TimedSpan


def time_span(site: Site, judge: Judge) -> TimedSpan:
    """Time the kernel before a span against the one after it.

    Raises Disturbed where the timing says nothing, UsageError where a kernel is not right here.
    """
    case = msgspec.structs.replace(site.lineage.case, at_least=LEAST)
    verdict = undisturbed(judge(case, site.before, site.after), site.position)
    return TimedSpan(steps=site.span, verdict=verdict)
