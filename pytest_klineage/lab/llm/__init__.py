"""Language models: where replies come from, what they cost, what is recorded. What is asked is said elsewhere."""

from __future__ import annotations

from pytest_klineage.lab.llm.backend import Backend, Reply
from pytest_klineage.lab.llm.budget import Budget
from pytest_klineage.lab.llm.choose import BACKENDS, make_backend
from pytest_klineage.lab.llm.conversation import Conversation, Prefix, Role, Turn
from pytest_klineage.lab.llm.edits import (
    Block,
    apply_edits,
    apply_to_files,
    code_blocks,
    edit_blocks,
    one_block,
    one_object,
    usable_text,
)
from pytest_klineage.lab.llm.faults import (
    BackendFailed,
    BudgetExhausted,
    Failure,
    Malformation,
    MalformedReply,
    ModelError,
    NoBackend,
    NoKey,
    NoPrice,
    TrajectoryMismatch,
)
from pytest_klineage.lab.llm.prices import CacheLife, Price, Prices
from pytest_klineage.lab.llm.session import Chat, Session
from pytest_klineage.lab.llm.trajectory import Trajectory, read_trajectory

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendFailed",
    "Block",
    "Budget",
    "BudgetExhausted",
    "CacheLife",
    "Chat",
    "Conversation",
    "Failure",
    "Malformation",
    "MalformedReply",
    "ModelError",
    "NoBackend",
    "NoKey",
    "NoPrice",
    "Prefix",
    "Price",
    "Prices",
    "Reply",
    "Role",
    "Session",
    "Trajectory",
    "TrajectoryMismatch",
    "Turn",
    "apply_edits",
    "apply_to_files",
    "code_blocks",
    "edit_blocks",
    "make_backend",
    "one_block",
    "one_object",
    "read_trajectory",
    "usable_text",
]
