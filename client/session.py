"""An open session and its recovery; synchronous. See ``session_core`` for the rules it shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from modeld.client.calls import Call, Deadlines, TurnEvent
from modeld.client.chat import History, require_chat
from modeld.client.decode_options import DecodeOptions
from modeld.client.errors import RECOVERABLE, ClientError
from modeld.client.prompts import (
    GeneratedTurn,
    Image,
    Message,
    PromptInput,
    PromptItem,
    PromptPart,
    ToolInput,
    prompt_part,
)
from modeld.client.residency import SessionResidency
from modeld.client.session_core import (
    SessionCore,
    StreamState,
    decode_options,
    not_sent_again,
    restores,
)
from modeld.client.streams import DecodeStream, EventCallback, TurnStream
from modeld.client.transport import Stream, Transport
from modeld.client.values import (
    Closed,
    ContextReport,
    Opened,
    PrefillStatus,
    Recovery,
    Saved,
    SessionHandle,
)
from modeld.client.values_capacity import Resolution
from modeld.shared.capabilities import Capability
from modeld.shared.errors import ModeldError, SessionClosed
from modeld.shared.manifest import Identity

T = TypeVar("T")


class Opener(Protocol):
    """What a session needs of its client."""

    deadlines: Deadlines

    @property
    def transport(self) -> Transport: ...

    def reconnect(self) -> None:
        """Make sure the transport reaches the present owner of the data root, or raise."""

    def reopen(self, core: SessionCore) -> Opened: ...


class Session(SessionResidency):
    """A conversation's KV state on a daemon. Use it as a context manager, or ``close`` it.

    Every call raises one class of ``modeld.shared.errors`` for the daemon's typed answers and one
    of ``modeld.client.errors`` for what the transport says.
    """

    def __init__(self, client: Opener, core: SessionCore) -> None:
        self._client = client
        self._core = core

    # --- what was agreed -------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        return self._core.identity

    @property
    def handle(self) -> SessionHandle:
        return self._core.handle

    @property
    def resolution(self) -> Resolution:
        """The six context numbers and the budget, as resolved when the session was opened."""
        return self._core.opened.resolution

    @property
    def capabilities(self) -> dict[str, Capability]:
        return {c.name: c for c in self._core.opened.capabilities}

    @property
    def opened(self) -> Opened:
        """The whole answer of the latest open."""
        return self._core.opened

    @property
    def model(self) -> str:
        """Its name in the store."""
        return self._core.options.model

    def has_turn(self, turn_id: str) -> bool:
        """Whether this session has that answer, though another one gave it (by fork or restore)."""
        return self._core.turns is not None and turn_id in self._core.turns

    @property
    def saved(self) -> Saved | None:
        """Of a durable session, how saving it went last: at an answer's end, or when it was forked.
        None: not yet, as far as this client knows.
        """
        return self._core.saved

    @property
    def recoveries(self) -> list[Recovery]:
        """Every time this session was lost and continued as another, oldest first."""
        return list(self._core.recoveries)

    # --- the parts -------------------------------------------------------------------------------

    def ensure_prefix(
        self,
        prefix: PromptInput,
        *,
        tools: Sequence[ToolInput] = (),
        turn_id: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> PrefillStatus:
        """Make the resident KV equal the prefix. ``timeout`` in seconds."""
        part = prompt_part(prefix, stable=True, tools=tools)
        return self._send(
            "ensure_prefix",
            lambda: self._core.prefix_call(
                part, turn_id=turn_id, no_wait=no_wait, timeout_s=self._prefill_s(timeout)
            ),
            restore=False,
        )

    def prefill_suffix(
        self,
        suffix: PromptInput,
        *,
        extend: bool = False,
        turn_id: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> PrefillStatus:
        """Append the volatile part; replaces the last suffix, or extends it."""
        part = prompt_part(suffix, stable=False)
        return self._send(
            "prefill_suffix",
            lambda: self._core.suffix_call(
                part,
                extend=extend,
                turn_id=turn_id,
                no_wait=no_wait,
                timeout_s=self._prefill_s(timeout),
            ),
        )

    def decode(
        self,
        options: DecodeOptions | None = None,
        *,
        turn_id: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
        on_event: EventCallback | None = None,
        **keywords: Any,
    ) -> DecodeStream:
        """Generate from what is resident; keywords are those of ``DecodeOptions``."""
        chosen = decode_options(options, keywords)
        return DecodeStream(
            self,
            "decode",
            lambda: self._core.decode_call(
                chosen, turn_id=turn_id, no_wait=no_wait, timeout_s=self._turn_s(timeout)
            ),
            on_event,
        )

    def turn(
        self,
        prefix: PromptInput,
        suffix: PromptInput,
        options: DecodeOptions | None = None,
        *,
        tools: Sequence[ToolInput] = (),
        no_wait: bool = False,
        timeout: float | None = None,
        on_event: EventCallback | None = None,
        _on_done: Callable[[StreamState, GeneratedTurn | None], None] | None = None,
        **keywords: Any,
    ) -> TurnStream:
        """Prefix, suffix and decode as one protected operation; starts at the first item taken."""
        chosen = decode_options(options, keywords)
        before = prompt_part(prefix, stable=True, tools=tools)
        after = prompt_part(suffix, stable=False)
        return TurnStream(
            self,
            "turn",
            lambda: self._core.turn_call(
                before, after, chosen, no_wait=no_wait, timeout_s=self._turn_s(timeout)
            ),
            on_event,
            _on_done,
        )

    def chat(self, system: str = "", *, history: Sequence[PromptItem] = ()) -> Chat:
        """A conversation that keeps its own history. Raises InvalidRequest on a raw session."""
        require_chat(self.identity.prompt_format)
        return Chat(self, History.starting(system, history))

    def explain(self) -> ContextReport:
        """What is resident and why."""
        return self._send("explain", self._core.explain_call)

    def close(self, *, discard: bool = False) -> Closed:
        """Close the session; what it held stays as reclaimable cache unless ``discard``.

        Idempotent, and not an error where the session is gone already. ``discard`` also forgets
        what is saved of a durable one, by its key, whatever became of the session; it raises what
        stands against that, and may be asked for again.
        """
        return self._end(discard=discard, detach=False)

    def detach(self) -> None:
        """Leave the session open for whoever attaches by its key, in no switch's way."""
        self._end(discard=False, detach=True)

    def _end(self, *, discard: bool, detach: bool) -> Closed:
        core = self._core
        call = core.end_call(discard=discard, detach=detach)
        if call is None:
            return Closed(0)
        try:
            try:
                answer = self._client.transport.unary(call)
            except RECOVERABLE:
                if not (discard and core.options.durable and core.recover):
                    raise
                self._client.reconnect()
                answer = self._client.transport.unary(call)
        except (ModeldError, ClientError) as error:
            if core.not_ended(error, discard=discard):
                raise
            return Closed(0)
        core.discarded = discard
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except (ModeldError, ClientError):
            if error is None:
                raise

    # --- sending and recovery --------------------------------------------------------------------

    def _prefill_s(self, timeout: float | None) -> float | None:
        return timeout if timeout is not None else self._core.deadlines.prefill_s

    def _turn_s(self, timeout: float | None) -> float | None:
        return timeout if timeout is not None else self._core.deadlines.turn_s

    def _send(self, operation: str, make: Callable[[], Call[T]], *, restore: bool = True) -> T:
        """One call, and once more after a recovery: these calls may be repeated without harm."""
        self.begin(operation, restore=restore)
        try:
            return self._unary(make())
        except RECOVERABLE as cause:
            if not self.recover_from(cause, operation, retry=True, restore=restore):
                raise
        return self._unary(make())

    def _send_once(self, operation: str, make: Callable[[], Call[T]]) -> T:
        """One call that isn't sent again after a loss: it may have had its effect."""
        self.begin(operation)
        try:
            return self._unary(make())
        except RECOVERABLE as cause:
            self.recover_from(cause, operation, retry=False)
            raise

    def _unary(self, call: Call[T]) -> T:
        try:
            return self._client.transport.unary(call)
        except BaseException as error:
            self._core.failed(error)
            raise

    def _beside(self, core: SessionCore) -> Session:
        return Session(self._client, core)

    def begin(self, operation: str, *, restore: bool | None = None) -> None:
        if self._core.closed:
            raise SessionClosed("This session was closed by this client. Open another one.")
        if self._core.lost is not None:
            self._recover(self._core.lost, operation, True, restores(operation, restore))

    def send(self, call: Call[TurnEvent]) -> Stream[TurnEvent]:
        return self._client.transport.stream(call, self._core.deadlines.stall_s)

    def done(self, state: StreamState) -> GeneratedTurn | None:
        return self._core.generated(state)

    def failed(self, error: BaseException) -> None:
        self._core.failed(error)

    def recover_from(
        self, cause: Exception, operation: str, *, retry: bool, restore: bool | None = None
    ) -> bool:
        """Reopen after a loss. True: the call may be sent again. False: raise the cause.

        Without ``retry`` the session is reopened for the next call all the same; should that
        fail, the next call tries again.
        """
        if not self._core.recover:
            return False
        self._core.lost = cause
        if retry:
            self._recover(cause, operation, True, restores(operation, restore))
            return True
        try:
            self._recover(cause, operation, False, restores(operation, restore))
            cause.add_note(f"{not_sent_again(operation)}; the session was reopened.")
        except (ModeldError, ClientError) as error:
            cause.add_note(f"The session could not be reopened yet: {error}")
        return False

    def _recover(self, cause: Exception, operation: str, retried: bool, restore: bool) -> None:
        core = self._core
        prefix, suffix = core.prefix, core.suffix
        try:
            self._client.reconnect()
            opened = self._client.reopen(core)
            core.adopt(opened, cause, operation=operation, retried=retried)
            if core.is_where_it_was():
                return
            core.prefix = core.suffix = None
            if restore and prefix is not None:
                self._ensure_again(prefix, suffix)
        except BaseException as error:  # a cancel too: the next call begins anew
            core.lost, core.prefix, core.suffix = cause, prefix, suffix
            if isinstance(error, ModeldError | ClientError):
                raise error from cause
            raise

    def _ensure_again(self, prefix: PromptPart, suffix: PromptPart | None) -> None:
        core, limit_s = self._core, self._core.deadlines.prefill_s
        transport = self._client.transport
        call = core.prefix_call(prefix, turn_id="", no_wait=False, timeout_s=limit_s)
        transport.unary(call)
        if suffix is not None:
            call = core.suffix_call(
                suffix, extend=False, turn_id="", no_wait=False, timeout_s=limit_s
            )
            transport.unary(call)


class Chat:
    """A conversation: each ``send`` has all that was said as its prefix."""

    def __init__(self, session: Session, history: History) -> None:
        self._session = session
        self._history = history

    @property
    def history(self) -> list[PromptItem]:
        return list(self._history.items)

    @property
    def session(self) -> Session:
        return self._session

    def send(
        self, text: str | Message, *, images: Sequence[Image] = (), **options: Any
    ) -> TurnStream:
        """The answer to a user's message, as a stream; options are those of ``turn``.

        ``images`` go with a ``text`` that is a string. From the first message with an image on,
        the conversation is sent as the suffix, which is the only place where images are taken.
        """
        user = Message.user(text, images) if isinstance(text, str) else text
        prefix, suffix = self._history.parts(user)
        return self._session.turn(prefix, suffix, _on_done=self._history.recorder(user), **options)
