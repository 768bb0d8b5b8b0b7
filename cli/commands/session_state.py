"""``modeld sessions show|snapshot|restore|fork``: what an open session holds, kept and branched."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click

from modeld.cli import conversations, texts
from modeld.cli.answering import tell_unsaved
from modeld.cli.attaching import attached, found, having, opened_as
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, note, say, seconds, size, table
from modeld.client import (
    Client,
    ContextReport,
    InvalidRequest,
    ModelNotFound,
    ResidentBlock,
    Restored,
    Session,
    SnapshotInfo,
    SnapshotNotFound,
    to_plain,
)
from modeld.shared.ids import check_session_key


@click.command("show", short_help="What a session attends to, and what not.")
@click.argument("key")
@global_options
@pass_settings
def show(settings: Settings, key: str) -> None:
    """Show what the session of KEY holds, by token ranges of its conversation.

    hot: the model attends to it. retained: kept behind the context until something else takes its
    place. parked: out of attention, its memory kept aside. gone: out of attention, and read anew if
    it is ever admitted again. A session that is parked as a whole is brought back for it.
    """
    with connect(settings) as client, attached(client, found(client, key)) as session:
        report = session.explain()
    if settings.json:
        emit_json(report)
        return
    _report(key, report)


def _report(key: str, report: ContextReport) -> None:
    say(f"{key}: {count(report.resident)} tokens resident, {count(report.available)} left", "bold")
    say(
        f"retained {count(report.retained)}, parked {count(report.parked)}, gone "
        f"{count(report.gone)}, seen in all {count(report.seen_tokens)}"
    )
    table(
        "tokens",
        ("from", "to", "state", "what", "class", ""),
        [
            (
                count(blocks[0].token_begin),
                count(blocks[-1].token_end),
                blocks[0].state,
                blocks[0].what,
                blocks[0].cache_class or "–",
                "protected" if blocks[0].protected_range else "",
            )
            for blocks in _joined(report.blocks)
        ],
    )
    table("counters", ("", ""), [(c.name, count(c.value)) for c in report.counters])
    if report.last_fatal:
        say(f"last fatal: {report.last_fatal}")


def _joined(blocks: tuple[ResidentBlock, ...]) -> list[list[ResidentBlock]]:
    """Neighbours that are alike, as one."""
    alike = groupby(blocks, lambda b: (b.state, b.what, b.cache_class, b.protected_range))
    return [list(group) for _kind, group in alike]


@click.command("snapshot", short_help="Keep what a session holds.")
@click.argument("key")
@click.option("--label", default="", help="A name for people; snapshots are found by their id.")
@global_options
@pass_settings
def snapshot(settings: Settings, key: str, label: str) -> None:
    """Keep what the session of KEY holds, durably; `modeld snapshots` lists what is kept."""
    label = texts.argument(label, "--label")
    with connect(settings) as client, attached(client, found(client, key)) as session:
        info = session.snapshot(label)
    if settings.json:
        emit_json(info)
    else:
        say(
            f"kept {count(info.tokens)} tokens as {info.snapshot_id} ({size(info.size_bytes)}, "
            f"{seconds(info.seconds)})"
        )


@click.command("restore", short_help="Bring a snapshot back into a session.")
@click.argument("key")
@click.argument("snapshot_id")
@global_options
@pass_settings
def restore(settings: Settings, key: str, snapshot_id: str) -> None:
    """Make the session of KEY what the snapshot holds, in the place of what it has.

    Where none is open under KEY, one is opened like the one that was saved.

    It brings back what the model holds. The text of the conversation that is kept under KEY (`run
    --session KEY`) goes back with it: what was said after the snapshot's last answer is no longer
    in it. Fork the session first to keep both. Where nothing is kept under KEY, the text is copied
    from the conversation that the snapshot was taken of, if that is still there, so that `run
    --session KEY` goes on from the snapshot.
    """
    with connect(settings) as client:
        kept = snapshot_of(client, snapshot_id)
        those = having(client, key)
        if those:
            with attached(client, those[0]) as session:
                key = those[0].session_key
                restored, text = _restored(settings, client, session, key, snapshot_id)
        else:
            session = _opened_like(
                client, kept, key, durable=_was_durable(settings, client, kept, key)
            )
            try:
                restored, text = _restored(settings, client, session, key, snapshot_id)
            except BaseException:
                session.close()
                raise
            session.detach()
        how = text and _going_on(client, session, key)
    if settings.json:
        emit_json({**to_plain(restored), "opened": not those, "conversation": text and str(text)})
        return
    exact = "exact" if restored.exact else f"not exact: {restored.exact_reason}"
    say(
        f"{key}{'' if those else ', a new session,'} holds {count(restored.tokens)} tokens of "
        f"{snapshot_id} ({seconds(restored.seconds)}, {exact})"
    )
    if how is not None:
        note(f"go on with `{how}`")


def _going_on(client: Client, session: Session, key: str) -> str:
    """The command; what the conversation doesn't remember of how its session was opened is said."""
    adapters = session.identity.adapters
    names = {one.digest: one.name for one in client.models()} if adapters else {}
    words = ["modeld run", session.model, "PROMPT --session", key]
    words += ["--raw"] if session.identity.prompt_format == "raw" else []
    words += [f"--adapter {names.get(a.digest, a.digest)}={a.scale!r}" for a in adapters]
    return " ".join(words)


def _restored(
    settings: Settings, client: Client, session: Session, key: str, snapshot_id: str
) -> tuple[Restored, Path | None]:
    """The session's restore, and where its conversation's text is, back with it; None: nowhere."""
    path, model = conversations.path_of(settings.root, key), session.model
    prompt_format = session.identity.prompt_format
    kept: conversations.Conversation | None = None
    if path.exists():  # read first: what can't be used is refused before anything changes
        kept = conversations.load(settings.root, key, prompt_format, model)
    opened = opened_as(found(client, session.handle.session_id), session.resolution)
    restored = session.restore(snapshot_id)
    turns = restored.generated_turn_ids
    if kept is None:
        text = turns and conversations.with_answer(settings.root, turns[-1], prompt_format, model)
        if not text:
            note(
                "no text of it is kept here: a program that has it goes on from it, and `modeld "
                f"run --session {key}` begins anew, in the place of what was restored",
                "yellow",
            )
            return restored, None
        source, kept = text
        note(f"its text is copied from {source} to {path}")
    if kept.durable and not opened["durable"]:
        note("this session isn't durable: it is not saved after each answer", "yellow")
    kept = replace(kept, **opened)  # so that `run --session` finds this session as it is
    later = kept.back_to(set(turns), session.handle.session_id)
    conversations.save(settings.root, key, kept)
    if later:
        note(f"{count(later)} later exchange(s) are not in {path}")
    if not any(exchange.turn_id for exchange in kept.exchanges):
        note(
            f"{path} has none of its answers: `modeld run --session {key}` goes on with that text, "
            "in the place of what was restored",
            "yellow",
        )
        return restored, None
    return restored, path


def _was_durable(settings: Settings, client: Client, kept: SnapshotInfo, key: str) -> bool:
    """Whether the key is a durable session's of that model: by its text, or by what is saved."""
    if conversations.path_of(settings.root, key).exists():
        prompt_format = kept.identity.prompt_format
        return conversations.load(settings.root, key, prompt_format, kept.model).durable
    digest = kept.identity.model_digest
    saved = client.saved_sessions()
    return any(one.session_key == key and one.model_digest == digest for one in saved)


def _opened_like(client: Client, kept: SnapshotInfo, key: str, *, durable: bool) -> Session:
    identity = kept.identity
    names = [m.name for m in client.models() if m.digest == identity.model_digest]
    if not names:
        raise ModelNotFound(
            f"No model here has the content of {kept.model!r}, which the snapshot is of. Import "
            f"it: its digest is {identity.model_digest}.",
            metadata={"model": kept.model, "digest": identity.model_digest},
        )
    return client.open_session(
        kept.model if kept.model in names else names[0],
        session_key=check_session_key(key),
        window=kept.window,
        k_type=kept.k_type,
        v_type=kept.v_type,
        overflow=kept.overflow.value.removeprefix("OVERFLOW_").lower(),
        prompt_format=identity.prompt_format,
        profile_id=identity.profile_id,
        adapters=identity.adapters,
        durable=durable,
    )


def snapshot_of(client: Client, snapshot_id: str) -> SnapshotInfo:
    """Raises SnapshotNotFound."""
    for info in client.list_snapshots().snapshots:
        if info.snapshot_id == snapshot_id:
            return info
    raise SnapshotNotFound(
        f"No snapshot has the id {snapshot_id!r}. `modeld snapshots list` lists them.",
        metadata={"snapshot_id": snapshot_id},
    )


@click.command("fork", short_help="Branch a session.")
@click.argument("key")
@click.argument("new_key")
@click.option("--durable", is_flag=True, help="Save the new session after each of its answers.")
@global_options
@pass_settings
def fork(settings: Settings, key: str, new_key: str, durable: bool) -> None:
    """Open a second session, NEW_KEY, that holds what the session of KEY does.

    Each goes on by itself. The text of a conversation (`run --session KEY`) is copied with it, so
    that `run --session NEW_KEY` goes on from here.
    """
    path = conversations.path_of(settings.root, new_key)
    if path.exists():
        raise InvalidRequest.of(
            "new_key", new_key, "a key without a conversation", f"Take another, or remove {path}."
        )
    with connect(settings) as client:
        source = found(client, key)
        with attached(client, source) as session:
            branch = session.fork(session_key=new_key, durable=durable)
            try:
                _copy_text(settings, client, session, branch, source.session_key, new_key)
                branch.detach()
            except BaseException:
                branch.close(discard=True)
                raise
    saved = branch.saved
    if settings.json:
        emit_json({**to_plain(branch.opened), "saved": to_plain(saved)})
        return
    say(f"{new_key} has {count(branch.opened.resident)} tokens of {key}")
    if saved is not None and saved.ok:
        note(f"saved ({size(saved.written_bytes)}, {seconds(saved.seconds)})")
    else:
        tell_unsaved(saved)


def _copy_text(
    settings: Settings, client: Client, session: Session, branch: Session, key: str, new_key: str
) -> None:
    if not conversations.path_of(settings.root, key).exists():
        return
    prompt_format = branch.identity.prompt_format
    kept = conversations.load(settings.root, key, prompt_format, session.model)
    shared = {e.turn_id for e in kept.exchanges if branch.has_turn(e.turn_id)}
    kept.moved(shared, branch.handle.session_id)
    opened = opened_as(found(client, branch.handle.session_id), session.resolution)
    conversations.save(settings.root, new_key, replace(kept, **opened))
    note(f"its text is copied to {conversations.path_of(settings.root, new_key)}")
