"""Values mirror the protos field for field, and their JSON is protobuf's own with plain numbers."""

from __future__ import annotations

import base64
import inspect
from enum import Enum

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from modeld.client import values, values_capacity, values_daemon, values_residency
from modeld.client.convert import from_proto
from modeld.v1 import common_pb2, daemon_pb2, model_pb2, session_pb2

PAIRS = [
    (values.Opened, session_pb2.OpenSessionResponse),
    (values.PrefillStatus, session_pb2.PrefillStatus),
    (values.Chunk, session_pb2.Chunk),
    (values.Final, session_pb2.Final),
    (values.ContextReport, session_pb2.ExplainContextResponse),
    (values_daemon.Description, session_pb2.DescribeResponse),
    (values.Tokens, session_pb2.TokenizeResponse),
    (values.Embeddings, session_pb2.EmbedResponse),
    (values.Detokenized, session_pb2.DetokenizeResponse),
    (values.Rendered, session_pb2.RenderTemplateResponse),
    (values.SessionList, session_pb2.ListSessionsResponse),
    (values.SavedSessionList, session_pb2.ListSavedSessionsResponse),
    (values_residency.SnapshotInfo, session_pb2.SnapshotInfo),
    (values_residency.SnapshotList, session_pb2.ListSnapshotsResponse),
    (values_residency.SnapshotChunk, session_pb2.SnapshotChunk),
    (values_residency.Restored, session_pb2.RestoreResponse),
    (values_residency.Admitted, session_pb2.AdmitResponse),
    (values_residency.Forked, session_pb2.ForkResponse),
    (values.Closed, session_pb2.CloseSessionResponse),
    (values.QueueStatus, common_pb2.QueueStatus),
    (values.LoadProgress, session_pb2.LoadProgress),
    (values_daemon.ModelList, model_pb2.ListModelsResponse),
    (values_daemon.Loaded, model_pb2.LoadModelResponse),
    (values_daemon.Unloaded, model_pb2.UnloadModelResponse),
    (values_daemon.ImportProgress, model_pb2.ImportProgress),
    (values_daemon.Removed, model_pb2.RemoveModelResponse),
    (values_daemon.DiskStats, model_pb2.DiskStatsResponse),
    (values_daemon.DaemonStatus, daemon_pb2.StatusResponse),
    (values_daemon.Event, daemon_pb2.Event),
    (values_daemon.Draining, daemon_pb2.DrainResponse),
    (values_daemon.QuarantineCleared, daemon_pb2.ClearQuarantineResponse),
]


def fill(message, seed=1):
    """Give every field of a message a value of its own."""
    for field in message.DESCRIPTOR.fields:
        seed += 1
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            target = getattr(message, field.name)
            if field.message_type.GetOptions().map_entry:
                target[f"key {seed}"] = f"text {seed}"
                continue
            fill(target.add() if field.is_repeated else target, seed)
            continue
        value = {
            FieldDescriptor.CPPTYPE_STRING: b"\x00\xff"
            if field.type == FieldDescriptor.TYPE_BYTES
            else f"text {seed}",
            FieldDescriptor.CPPTYPE_BOOL: True,
            FieldDescriptor.CPPTYPE_DOUBLE: seed + 0.5,
            FieldDescriptor.CPPTYPE_FLOAT: seed + 0.5,
            FieldDescriptor.CPPTYPE_ENUM: field.enum_type
            and max(v.number for v in field.enum_type.values if v.number <= 2),
        }.get(field.cpp_type, seed)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def plain_numbers(data, message_type):
    """json_format's dictionary, with 64-bit integers as numbers."""
    result = {}
    for name, value in data.items():
        field = message_type.fields_by_name[name]
        wide = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            items = value if field.is_repeated else [value]
            value = [plain_numbers(item, field.message_type) for item in items]
            value = value if field.is_repeated else value[0]
        elif wide:
            value = [int(v) for v in value] if field.is_repeated else int(value)
        result[name] = value
    return result


@pytest.mark.parametrize(("cls", "proto"), PAIRS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_json_of_a_value_is_protobufs_own_with_plain_numbers(cls, proto, filled):
    message = fill(proto()) if filled else proto()
    if not filled:
        for field in proto.DESCRIPTOR.fields:  # absent messages read as their defaults
            if field.message_type is not None and not field.is_repeated:
                getattr(message, field.name).SetInParent()
    expected = plain_numbers(
        json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
        proto.DESCRIPTOR,
    )
    got = values.to_plain(from_proto(cls, message))
    assert strip_absent(got, expected) == expected


def strip_absent(got, expected):
    """Drop nested defaults that protobuf's JSON leaves out for messages that aren't set."""
    if isinstance(got, dict) and isinstance(expected, dict):
        return {k: strip_absent(v, expected[k]) for k, v in got.items() if k in expected}
    if isinstance(got, list) and isinstance(expected, list):
        return [strip_absent(g, e) for g, e in zip(got, expected, strict=True)]
    return got


def test_an_enum_value_of_a_newer_daemon_is_tolerated():
    status = json_format.ParseDict({"miss_reason": 99}, session_pb2.PrefillStatus())
    assert status.miss_reason == 99
    assert from_proto(values.PrefillStatus, status).miss_reason is values.MissReason.UNRECOGNIZED


def test_enums_know_every_value_of_the_wire():
    for cls, proto in [
        (values.MissReason, session_pb2.MissReason),
        (values.StopReason, session_pb2.StopReason),
        (values_capacity.ContextReason, common_pb2.ContextReason),
        (values_daemon.SlotState, daemon_pb2.SlotState),
        (values.Overflow, session_pb2.Overflow),
        (values.Layout, session_pb2.Layout),
    ]:
        assert set(proto.keys()) == {member.value for member in cls} - {"UNRECOGNIZED"}


def test_bytes_become_base64():
    plain = values.to_plain(values.Detokenized("x", b"\xff\x00"))
    assert base64.b64decode(plain["raw"]) == b"\xff\x00"


def test_a_message_that_is_not_set_is_none_and_one_that_is_empty_is_not():
    final = session_pb2.Final()
    assert from_proto(values.Final, final).saved is None
    final.saved.SetInParent()
    assert from_proto(values.Final, final).saved == values.Saved(False, 0, 0, 0.0, "", "", 0)


@pytest.mark.parametrize("module", [values, values_residency])
def test_every_value_is_frozen(module):
    for _name, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ == module.__name__ and not issubclass(cls, Enum):
            assert vars(cls)["__dataclass_params__"].frozen, cls
