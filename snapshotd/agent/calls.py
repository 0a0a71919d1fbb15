"""Calls: the intent that is recorded before a function runs, and the outcome after it.

A call from within another call is part of that: it runs as a plain function, without a record or snapshot of its own.
"Within" follows the context (contextvars): awaited coroutines, tasks and `asyncio.to_thread` belong to the outer call
as long as it runs; a thread that a tool starts by itself does not, and neither does a process started by `spawn`. A
forked child of a running tool is part of that tool. Some calls must not run twice, or not without a question: such a
call is refused within another call, where it would be hidden.
"""

from __future__ import annotations

import base64
import itertools
import os
from contextvars import ContextVar
from typing import Any, Dict, Iterator, Optional, Tuple, Union

from snapshotd.agent import terminal
from snapshotd.agent.replay import Replayed
from snapshotd.agent.session import Waiting, session
from snapshotd.agent.spec import Spec
from snapshotd.agent.wire.connection import INLINE_LIMIT_BYTES, Denied, SnapshotdError
from snapshotd.agent.wire.link import Link
from snapshotd.agent.wire.values import arguments, bound, clean, encode, outputs, plain, text_of

ERROR_LIMIT_BYTES = 64 << 10
MODEL_REQUEST_LIMIT_BYTES = 7 << 20
"""Bound of a model call's arguments: leaves room below the 8 MiB that the protocol allows. A text that is cut has its
length and SHA-256."""
PIECE_BYTES = 512 << 10
"""Size of one `output` request; base64 makes it a third longer, and a line is at most 1 MiB."""

innermost: "ContextVar[Optional[Call]]" = ContextVar("snapshotd_call", default=None)
subtask: "ContextVar[Optional[str]]" = ContextVar("snapshotd_task", default=None)


class Call:
    """One call that has begun. `key`: its idempotency key, the same at every attempt; a call within a call has one of
    its own too, which is the same at every attempt if the outer call makes its calls in the same order."""

    __slots__ = (
        "args",
        "connection",
        "id",
        "key",
        "kwargs",
        "name",
        "open",
        "pid",
        "recorded",
        "replayed",
        "reported",
        "root",
        "spec",
        "usage",
        "within",
    )

    def __init__(
        self, spec: Spec, args: Tuple[Any, ...], kwargs: Dict[str, Any], root: "Optional[Call]" = None
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.args = args
        self.kwargs = kwargs
        self.id = os.urandom(16).hex()
        self.root = self if root is None else root
        self.key: str = self.id if root is None else "{}.{}".format(root.key, next(root.within))
        self.within: Iterator[int] = itertools.count(1)
        self.open = True
        self.pid = os.getpid()
        self.recorded = False
        self.replayed: Optional[Replayed] = None
        """The recorded outcome, if there is one: then the function does not run."""
        self.usage: Dict[str, Any] = {}
        """Usage of a model call as the program reports it; `reported`: as the model's reply reports it."""
        self.reported: Dict[str, Any] = {}
        self.connection: Optional[Link] = None
        """The one it has to be ended on, if that is not the session's own."""

    def take_answer(self, answer: Dict[str, Any], sent: Dict[str, Any]) -> None:
        """Do as the daemon's answer to the intent says: run, run with other arguments (`sent` are the recorded ones), or repeat
        the recorded outcome."""
        if "replayed" in answer:
            self.open = False
            self.replayed = Replayed(answer)
            return
        self.recorded = True
        self.key = answer.get("key") or self.key
        if "arguments" in answer:
            try:
                self.args, self.kwargs = self.spec.apply_edit(self.args, self.kwargs, sent, answer["arguments"])
            except BaseException as exc:
                self.fail(exc)
                raise

    def end(self, result: Any) -> None:
        """Record the outcome, and return when the snapshot is taken."""
        fields: Dict[str, Any] = {"status": "done"}
        self._record_end(fields, result, result)

    def fail(self, error: BaseException, result: Any = None) -> None:
        """Record the exception and the result before it, and return when the snapshot is taken."""
        try:
            message = clean(str(error))
        except Exception:  # noqa: BLE001 - foreign code: an exception's __str__ may raise anything
            message = text_of(error)
        kind = type(error).__name__
        text = "{}: {}".format(kind, message) if message else kind
        if result is None and type(error).__module__ == "subprocess" and hasattr(error, "stderr"):
            result = outputs(error) or None
        self._record_end({"status": "failed", "error": bound(text, ERROR_LIMIT_BYTES)}, result, error)

    def _record_end(self, fields: Dict[str, Any], result: Any, outcome: Any) -> None:
        self.open = False
        if not self.recorded or self.pid != os.getpid():
            return  # a child that was forked inside the tool returns too; the call is its parent's
        code = _exit_code(outcome)
        if code is not None:
            fields["exit_code"] = code
        if self.usage or self.reported:
            fields["usage"] = dict(self.reported, **self.usage)
        fields["call"] = self.id
        body = (
            None
            if fields["status"] == "failed" and result is None
            else put(fields, "result", _within_limit(self.spec.to_record(result)))
        )
        try:
            session.request("call_end", fields, body, park=self.spec.kind != "model", connection=self.connection)
        finally:
            session.release(self.connection)


def put(fields: Dict[str, Any], name: str, value: Any) -> Optional[bytes]:
    """Put a value that `plain` returned into a request: as a field, or as the body (returned) if it is long."""
    encoded = encode(value)
    if len(encoded) > INLINE_LIMIT_BYTES:
        return encoded
    fields[name] = value
    return None


def _within_limit(result: Any) -> Any:
    value = plain(result)
    size = len(encode(value))
    if size > session.body_limit_bytes:
        return "[not recorded: {} bytes of JSON, over the limit of {}]".format(size, session.body_limit_bytes)
    return value


def _exit_code(outcome: Any) -> Optional[int]:
    """The exit code a result or exception carries, as a shell counts it (128+N for signal N)."""
    if type(outcome).__module__ != "subprocess":
        return None
    code = getattr(outcome, "returncode", None)
    if not isinstance(code, int) or not -128 < code < 256:
        return None
    return code if code >= 0 else 128 - code


# -- beginning ---------------------------------------------------------------------------------------------------------


def begin(spec: Spec, args: Tuple[Any, ...], kwargs: Dict[str, Any], **extra: Any) -> Call:
    """Record the intent, with `extra` fields, and wait until the call may run. Outside of a sandbox and within another
    call nothing is recorded.

    Raises Denied, SnapshotdError, SnapshotdUnavailable; ValueError for a bad idempotency key.
    """
    call, waiting = _send(spec, args, kwargs, extra)
    if waiting is not None:
        answer = waiting[0].answer()
        call.connection = waiting[0].connection
        call.take_answer(answer, waiting[1])
    return call


async def begin_async(spec: Spec, args: Tuple[Any, ...], kwargs: Dict[str, Any], **extra: Any) -> Call:
    """`begin`, and an event loop goes on while a person is asked."""
    call, waiting = _send(spec, args, kwargs, extra)
    if waiting is not None:
        answer = await waiting[0].answer_async()
        call.connection = waiting[0].connection
        call.take_answer(answer, waiting[1])
    return call


def _send(
    spec: Spec, args: Tuple[Any, ...], kwargs: Dict[str, Any], extra: Dict[str, Any]
) -> "Tuple[Call, Optional[Tuple[Waiting, Dict[str, Any]]]]":
    """Record the intent. Where something records it, the second part is the wait for the answer, with the arguments that
    were sent."""
    outer = current_call()
    if outer is not None and outer.root.open:
        if spec.side_effect != "local" or spec.approve:
            what = "gated" if spec.approve else spec.side_effect
            raise SnapshotdError(
                "{} is {} and was called within the call of {}, where it has no record of its own; call it outside of "
                "other tools.".format(spec.name, what, outer.root.name),
                "Conflict",
            )
        return Call(spec, args, kwargs, outer.root), None
    call = Call(spec, args, kwargs)
    own_key = spec.key_of(args, kwargs)
    if not session.inside():
        call.key = own_key or call.key
        if spec.approve:
            decision = terminal.ask(
                spec.approve if isinstance(spec.approve, str) else "Run {}?".format(spec.name), spec.bind(args, kwargs)
            )
            if not decision["approved"]:
                raise Denied("{} was not approved: {}".format(spec.name, decision["reason"]))
        return call, None
    limits = (
        {"limit_bytes": MODEL_REQUEST_LIMIT_BYTES, "together_bytes": MODEL_REQUEST_LIMIT_BYTES}
        if spec.kind == "model"
        else {}
    )
    sent = arguments(spec.bind(args, kwargs), **limits)
    fields: Dict[str, Any] = {"call": call.id, "name": spec.name}
    optional = {
        "kind": "" if spec.kind == "tool" else spec.kind,
        "side_effect": "" if spec.side_effect == "local" else spec.side_effect,
        "key": own_key,
        "approve": spec.approve,
        "compensate": spec.compensate,
        "task": subtask.get(),
    }
    fields.update((name, value) for name, value in optional.items() if value)
    if spec.kind == "tool":
        fields.update(spec.reusable())
    fields.update(extra)
    body = put(fields, "arguments", sent)
    return call, (session.begin_call(fields, body), sent)


# -- the running call --------------------------------------------------------------------------------------------------


def current_call() -> Optional[Call]:
    """The call that runs here: `current_call().key` is its idempotency key, the same at every attempt. None outside of
    tools."""
    return innermost.get()


def running() -> Optional[Call]:
    """The outermost call that runs here."""
    call = innermost.get()
    return call.root if call is not None and call.root.open else None


def within() -> Dict[str, Any]:
    """The field of a request that says in which recorded call it was made, if in one: a replay does not make it
    again."""
    call = running()
    return {} if call is None or not call.recorded else {"within": call.id}


def emit(data: Union[str, bytes], stream: str = "stdout") -> None:
    """Pass on a piece of output of the running tool to its followers; it is kept with the call. `stream`: `stdout` or
    `stderr`.

    Outside of tools and sandboxes nothing happens. Raises SnapshotdError or SnapshotdUnavailable.
    """
    if stream not in ("stdout", "stderr"):
        raise ValueError("The stream is {!r}; it can be stdout or stderr.".format(stream))
    call = running()
    if call is None or not call.recorded or call.pid != os.getpid():
        return
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else bytes(data)
    for start in range(0, len(content), PIECE_BYTES):
        piece = base64.b64encode(content[start : start + PIECE_BYTES]).decode("ascii")
        session.request("output", {"call": call.id, "stream": stream, "data_b64": piece}, connection=call.connection)


def record_usage(**usage: float) -> None:
    """Record the usage of the running model call, by convention `input_tokens`, `output_tokens`, `cost_usd`; it is
    added to the usage in its reply. Outside of model calls nothing happens."""
    call = current_call()
    if call is not None and call.spec.kind == "model":
        call.usage.update({clean(name): plain(amount) for name, amount in usage.items()})
