"""Every record survives JSON; what does not decode says why; the JSON Schema names every field."""

from __future__ import annotations

import enum
import functools
import json
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_klineage import records
from pytest_klineage.errors import BadRecord, UsageError
from pytest_klineage.records import (
    SCHEMA_VERSION,
    Code,
    KernelCase,
    KernelSource,
    Machine,
    Reason,
    SourceFile,
    TrajectoryLine,
    Usage,
    Verdict,
    from_json,
    from_plain,
    json_schema,
    messages,
    template_messages,
    to_json,
    to_plain,
)


def structs_of(module: types.ModuleType) -> list[type[msgspec.Struct]]:
    return [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]  # fmt: skip


STORED = structs_of(records)
SENT = [
    kind
    for module in (messages, template_messages)
    for kind in structs_of(module)
    if kind.__module__ == module.__name__
]
UNIONS = {
    "ToWorker": messages.ToWorker,
    "FromWorker": messages.FromWorker,
    "ToOracle": messages.ToOracle,
    "FromOracle": messages.FromOracle,
    "ToTemplate": template_messages.ToTemplate,
    "FromTemplate": template_messages.FromTemplate,
}
WORDS = st.text(max_size=8)
SPECIAL: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (KernelCase, "at_least"): st.floats(1e-3, 1e3),
    (KernelCase, "max_spills"): st.none(),
    (KernelCase, "requires"): st.just(()),
    (TrajectoryLine, "schema_version"): st.just(SCHEMA_VERSION),
    (SourceFile, "name"): st.sampled_from(["kernel.cpp", "tile.h", "Ünï.cu"]),
    (Verdict, "schema_version"): st.just(SCHEMA_VERSION),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation as the records use them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(values_of(arguments[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: records_of(hint))
    plain = {
        str: WORDS,
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        type(None): st.none(),
    }
    return plain[hint]


@functools.cache
def records_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {
        name: SPECIAL[kind, name] if (kind, name) in SPECIAL else values_of(hints[name])
        for name in kind.__struct_fields__
    }
    return st.builds(lambda **given: kind(**given), **fields)


def test_there_are_records_to_test() -> None:
    assert {Verdict, KernelCase, KernelSource, Machine, Usage, Reason} <= set(STORED)
    assert len(SENT) > 20


@pytest.mark.parametrize("kind", [*STORED, *SENT], ids=lambda kind: kind.__name__)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_record_survives_json_and_plain_data(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    assert from_plain(to_plain(record), kind) == record
    if not kind.__struct_config__.array_like:
        assert from_json(to_json(record), kind) == record
    assert b"\n" not in to_json(record)


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_message_is_known_by_its_tag_in_its_union(union: Any, data: st.DataObject) -> None:
    message = data.draw(st.one_of([records_of(kind) for kind in typing.get_args(union)]))
    assert msgspec.json.decode(msgspec.json.encode(message), type=union) == message


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.__name__)
def test_records_cannot_be_changed(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


def verdict() -> Verdict:
    case = KernelCase(operator="gemm", shape={"M": 2, "N": 3, "K": 4}, dtype="fp32", reference="torch")
    return Verdict(
        case=case, status=Code.ACCEPTED_SAME.status, reasons=(Reason(code=Code.ACCEPTED_SAME, message="as fast"),)
    )


def test_another_schema_version_names_both_versions() -> None:
    data = json.loads(to_json(verdict()))
    data["schema_version"] = SCHEMA_VERSION + 41
    with pytest.raises(BadRecord) as caught:
        from_json(json.dumps(data), Verdict)
    assert str(SCHEMA_VERSION + 41) in str(caught.value)
    assert f"reads {SCHEMA_VERSION}" in str(caught.value)


def test_another_schema_version_is_named_despite_other_changes() -> None:
    with pytest.raises(BadRecord, match="schema version 99"):
        from_json('{"schema_version": 99, "everything": "else"}', Verdict)


def test_a_verdict_carries_the_version_that_wrote_it() -> None:
    assert json.loads(to_json(verdict()))["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a valid Verdict"),
        (b"{", "not a valid Verdict"),
        (b"[]", "not a valid Verdict"),
        (b'{"status": "accepted"}', "case"),
        (b'{"schema_version": "one"}', "schema_version"),
        ("\N{SNOWMAN}", "not a valid Verdict"),
    ],
)
def test_what_does_not_decode_says_why(data: bytes | str, says: str) -> None:
    with pytest.raises(BadRecord, match=says):
        from_json(data, Verdict)


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", "excellent"), ("reasons", [{"code": "accepted.bribed", "message": ""}]), ("overhead_s", "long")],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: object) -> None:
    data = json.loads(to_json(verdict())) | {field: value}
    with pytest.raises(BadRecord, match=rf"\$\.{field}"):
        from_json(json.dumps(data), Verdict)
    with pytest.raises(BadRecord, match=rf"\$\.{field}"):
        from_plain(data, Verdict)


def test_a_case_with_a_field_that_does_not_exist_is_refused() -> None:
    data = json.loads(to_json(verdict().case)) | {"dtpye": "fp32"}
    with pytest.raises(BadRecord, match="dtpye"):
        from_json(json.dumps(data), KernelCase)


def test_a_bad_record_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        from_json("{}", KernelCase)


@pytest.mark.parametrize("kind", [*STORED, *SENT], ids=lambda kind: kind.__name__)
def test_the_json_schema_is_complete_and_resolves(kind: type[msgspec.Struct]) -> None:
    schema = json.loads(json.dumps(json_schema(kind)))
    definitions = schema.get("$defs", {})
    top = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not kind.__struct_config__.array_like:
        assert set(kind.__struct_encode_fields__) <= set(top["properties"])
    for reference in references_in(schema):
        assert reference.removeprefix("#/$defs/") in definitions


def references_in(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [found for item in schema for found in references_in(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"]] if "$ref" in schema else []
    return own + [found for item in schema.values() for found in references_in(item)]


def test_the_json_schema_lists_every_reason_code() -> None:
    codes = json_schema(Verdict)["$defs"]["Code"]["enum"]
    assert sorted(codes) == sorted(code.value for code in Code)
