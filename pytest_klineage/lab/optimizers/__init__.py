"""Optimizers: one loop for every method that writes kernels with a model, and the methods. Nothing is judged here."""

from __future__ import annotations

from pytest_klineage.lab.optimizers.feedback import feedback_text
from pytest_klineage.lab.optimizers.instructions import instructions_for, machine_text
from pytest_klineage.lab.optimizers.progress import StepProgress
from pytest_klineage.lab.optimizers.proposal import proposed_source
from pytest_klineage.lab.optimizers.recording import (
    Recording,
    Rejudged,
    disagreements,
    recording_of,
    same_class,
    verdict_class,
)
from pytest_klineage.lab.optimizers.serving import card_text
from pytest_klineage.lab.optimizers.session import Method, Outcome, Stop, optimize
from pytest_klineage.lab.optimizers.task import Observation, Proposal, Task

__all__ = [
    "Method",
    "Observation",
    "Outcome",
    "Proposal",
    "Recording",
    "Rejudged",
    "StepProgress",
    "Stop",
    "Task",
    "card_text",
    "disagreements",
    "feedback_text",
    "instructions_for",
    "machine_text",
    "optimize",
    "proposed_source",
    "recording_of",
    "same_class",
    "verdict_class",
]
