"""One connection of the fake daemon: every request of docs/agent-protocol.md, checked and answered."""

from __future__ import annotations

import base64
import copy
import json
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

from snapshotd.errors import Conflict, Denied, Diverged, InternalError, NotFound, SnapshotdError, VersionMismatch
from tests.agent_daemon import DECISION_S, Entry, FakeDaemon, Killed

LINE_LIMIT_BYTES = 1 << 20
BODY_LIMIT_BYTES = 8 << 20
INLINE_BYTES = 32 << 10
NODE_LIMIT = 200_000
PAGE = 16
BODIES = {"call_begin", "call_end", "message", "state_set", "store_put"}
NAMED = {"message", "fact", "output", "store_get", "store_put", "store_delete", "store_search"}
PARKABLE = {"call_begin", "call_end", "checkpoint", "approve"}
Action = Callable[[dict[str, Any], "bytes | None"], dict[str, Any]]
TASK_STATUSES = {"pending", "in-progress", "completed", "failed", "skipped"}


class Malformed(Exception):  # noqa: N818 - as the daemon's own
    """The connection ends with this."""


class Peer:
    """One connection."""

    def __init__(self, daemon: FakeDaemon, connected: socket.socket) -> None:
        self.daemon = daemon
        self.socket = connected
        self.file = connected.makefile("rb")
        self.pid: int = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.open: dict[str, Entry] = {}
        self.greeted = False

    def run(self) -> None:
        try:
            while line := self.file.readline(LINE_LIMIT_BYTES + 1):
                self._answer(line)
        except Malformed as exc:
            self._send({"id": None, "error": {"code": "UsageError", "message": str(exc)}})
        except (OSError, ValueError, Killed):
            pass  # the peer is gone, or we are
        finally:
            self.daemon.forget(self.socket, set(self.open))
            self.file.close()
            self.socket.close()

    def _send(self, answer: dict[str, Any], part: float = 1) -> None:
        body = answer.pop("body", None)
        if body is not None:
            answer["body_bytes"] = len(body)
        data = json.dumps(answer).encode() + b"\n" + (body or b"")
        try:
            self.socket.sendall(data[: int(len(data) * part)])
        except OSError:
            pass

    def _die(self) -> None:
        self.daemon.die(self.pid)
        raise Killed

    def _answer(self, line: bytes) -> None:
        if len(line) > LINE_LIMIT_BYTES or not line.endswith(b"\n"):
            raise Malformed("the line is too long or cut off")
        request = json.loads(line, parse_constant=lambda name: _malformed(f"{name} is no number"))
        _check(request)
        op = request["op"]
        action = getattr(self, "op_" + op, None)
        if action is None:
            raise Malformed(f"there is no request {op}")
        if not self.greeted and op != "hello":
            raise Malformed("hello first")
        with self.daemon.lock:
            self.daemon.requests.append(request)
            death = self.daemon.deaths.pop(op, None)
        if death == "arriving":
            self._die()
        body = None
        if "body_bytes" in request:
            limit = self.daemon.body_limit_bytes if op == "call_end" else BODY_LIMIT_BYTES
            if op not in BODIES or request["body_bytes"] > limit:
                raise Malformed(f"no such body of {op}")
            body = self.file.read(request["body_bytes"])
            if len(body) < request["body_bytes"]:
                raise OSError("cut off")
            json.loads(body)
        elif op in BODIES:
            value = next(
                (request[name] for name in ("arguments", "result", "content", "value") if name in request), None
            )
            assert len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()) <= INLINE_BYTES, (
                "should travel as a body"
            )
        if op in PARKABLE:
            _is(request, "parked", bool, optional=True)
            if request.get("parked") is False:
                _text(request, "unparked_because", 200)
        if death == "before":
            self._die()
        answer = {"id": request["id"], **self._answered(action, request, body)}
        if death == "answering":
            self._send(answer, 0.5)
        if death is not None:
            self._die()
        self._send(answer)

    def _answered(self, action: Action, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        try:
            if request["op"] in self.daemon.refuse:
                raise self.daemon.refuse[request["op"]]
            return self._once(action, request, body)
        except SnapshotdError as exc:
            return {"error": {"code": exc.code, "message": exc.message}}
        except (Malformed, Killed):
            raise
        except Exception as exc:  # noqa: BLE001 - the top of a request
            return {"error": {"code": InternalError.__name__, "message": f"a defect: {exc!r}"}}

    def _once(self, action: Action, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        """Do it, or say again what was answered when it was done."""
        op = request["op"]
        if op in NAMED and not re.fullmatch(r"[0-9a-f]{16,32}", str(request.get("rid"))):
            raise Malformed("rid")
        known = (op, request.get("rid") or request.get("call") or "")
        with self.daemon.lock:
            answer = self.daemon.answers.get(known)
            if request.get("again") and answer is not None:
                if op == "call_begin":
                    self._take_over([known[1]])
                return dict(answer)
            if op in NAMED and answer is not None:
                raise Malformed("this rid had another request")
        answer = action(request, body)
        if known[1]:
            with self.daemon.lock:
                self.daemon.answers[known] = dict(answer)
        return answer

    def op_hello(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        if request.get("version") != 2:
            raise VersionMismatch("this is version 2")
        self.greeted = True
        with self.daemon.lock:
            self.daemon.pids.append(self.pid)
            if request.get("again"):
                self._take_over(request["calls"])
                return {
                    "version": 2,
                    "trajectory": "t" * 32,
                    "snapshot": "0" * 32,
                    "body_limit_bytes": self.daemon.body_limit_bytes,
                }
            return {
                "version": 2,
                "trajectory": "t" * 32,
                "snapshot": "0" * 32,
                "body_limit_bytes": self.daemon.body_limit_bytes,
                "replaying": self.daemon.replaying,
            }

    def _take_over(self, calls: list[str]) -> None:
        """Calls that have begun on a connection that was lost are this one's now, if they have not ended."""
        self.open.update(
            (entry.id, entry) for entry in self.daemon.journal if entry.id in calls and entry.status is None
        )

    # -- calls --

    def op_call_begin(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        daemon, call_id, name = self.daemon, _call_id(request), _text(request, "name", 200)
        kind = request.get("kind", "tool")
        side_effect = request.get("side_effect", "local")
        if kind not in ("tool", "model", "task") or side_effect not in ("local", "idempotent", "irreversible"):
            raise Malformed("kind or side_effect")
        if "key" in request:
            _text(request, "key", 200)
        if "approve" in request and request["approve"] is not True:
            _is(request, "approve", str)
        if "compensate" in request and not all(isinstance(part, str) for part in request["compensate"]["argv"]):
            raise Malformed("compensate")
        arguments = json.loads(body) if body is not None else request.get("arguments")
        with daemon.lock:
            if call_id in daemon.calls:
                raise Conflict("recorded before")
            if daemon.replaying and "parked" not in request:
                raise Malformed("not parked in a replay")
            was_replaying = daemon.replaying
            old = daemon.recorded(kind, name, arguments)
            if (
                old is not None
                and old.status is not None
                and (kind != "task" or (request.get("skippable") and old.status == "done"))
            ):
                daemon.skip_body(old)
                daemon.journal.append(old)
                daemon.state = copy.deepcopy(old.state)
                return _replayed(old)
            key = old.key if old is not None else request.get("key") or call_id[::-1]
            live = {"live": True} if was_replaying and (old is None or old.status is None) else {}
            if live:
                daemon.replaying = False
        edited = self._gate(request, name, arguments)
        with daemon.lock:
            entry = Entry(
                call_id, kind, name, arguments, key, within=request.get("within") or self._task_entry(request)
            )
            self.open[call_id] = entry
            daemon.journal.append(entry)
            daemon.calls[call_id] = {
                "name": name,
                "arguments": arguments,
                "pid": self.pid,
                "status": None,
                "kind": kind,
                "key": key,
                "request": request,
            }
            daemon.events.append(("begin", name))
        return {"key": key, **live, **edited}

    def _task_entry(self, request: dict[str, Any]) -> str | None:
        """The open task of that name: its entries are part of it."""
        found = [
            entry.id for entry in self.daemon.journal if entry.kind == "task" and entry.name == request.get("task")
        ]
        return found[-1] if found else None

    def _gate(self, request: dict[str, Any], name: str, arguments: Any) -> dict[str, Any]:
        if not request.get("approve") and name not in self.daemon.gated:
            return {}
        decision = self._wait({"question": request.get("approve"), "name": name, "arguments": arguments})
        if not decision["approved"]:
            raise Denied(f"{name} was denied: {decision.get('reason')}")
        return {"arguments": decision["arguments"]} if "arguments" in decision else {}

    def _wait(self, question: dict[str, Any]) -> dict[str, Any]:
        with self.daemon.lock:
            self.daemon.waiting.append(question)
            assert self.daemon.changed.wait_for(lambda: "decision" in question, DECISION_S), "nobody decided"
        decision: dict[str, Any] | None = question["decision"]
        if decision is None:
            raise Killed
        return decision

    def op_call_end(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        daemon, call_id = self.daemon, _call_id(request)
        if request.get("status") not in ("done", "failed"):
            raise Malformed("status")
        code = request.get("exit_code")
        if code is not None and (type(code) is not int or not 0 <= code <= 255):
            raise Malformed("exit_code")
        _is(request, "error", str, optional=True)
        _is(request, "usage", dict, optional=True)
        if call_id not in self.open:
            raise NotFound("this connection has no such call")
        daemon.at_end(self.pid)
        result = json.loads(body) if body is not None else request.get("result")
        with daemon.lock:
            entry = self.open.pop(call_id)
            entry.status = request["status"]
            entry.outcome = {
                "error": request.get("error"),
                "exit_code": code,
                "result": result,
                "snapshot": daemon.snapshot(),
            }
            entry.state = copy.deepcopy(daemon.state)
            daemon.calls[call_id].update(
                status=entry.status,
                error=request.get("error"),
                exit_code=code,
                result=result,
                usage=request.get("usage"),
                body_bytes=request.get("body_bytes"),
            )
            daemon.events.append(("end", entry.name, entry.status))
        return {"snapshot": entry.outcome["snapshot"]}

    def op_output(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        if _call_id(request) not in self.open:
            raise NotFound("no such call")
        if request.get("stream") not in ("stdout", "stderr"):
            raise Malformed("stream")
        data = base64.b64decode(request["data_b64"], validate=True)
        streams = self.daemon.outputs.setdefault(request["call"], {"stdout": b"", "stderr": b""})
        streams[request["stream"]] += data
        return {}

    def op_checkpoint(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        call_id, name = _call_id(request), _text(request, "name", 200)
        old, live = self._replayed_or_live("checkpoint", name, None)
        if old is not None:
            return {"snapshot": old.outcome["snapshot"]}
        snapshot = self.daemon.snapshot()
        with self.daemon.lock:
            self.daemon.events.append(("checkpoint", name))
            self.daemon.journal.append(
                Entry(
                    call_id,
                    "checkpoint",
                    name,
                    None,
                    call_id,
                    "done",
                    {"snapshot": snapshot},
                    copy.deepcopy(self.daemon.state),
                )
            )
        return {"snapshot": snapshot, **live}

    def op_approve(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        call_id = _call_id(request)
        _is(request, "question", str)
        if "expires_s" in request:
            _is(request, "expires_s", (int, float))
        old, live = self._replayed_or_live("question", request["question"], request.get("details"))
        if old is not None:
            return dict(old.outcome)
        decision = self._wait(
            {"question": request["question"], "details": request.get("details"), "expires_s": request.get("expires_s")}
        )
        with self.daemon.lock:
            self.daemon.journal.append(
                Entry(
                    call_id,
                    "question",
                    request["question"],
                    request.get("details"),
                    call_id,
                    "done",
                    decision,
                    copy.deepcopy(self.daemon.state),
                )
            )
        return {**decision, **live}

    def _replayed_or_live(self, kind: str, name: str, arguments: Any) -> tuple[Entry | None, dict[str, Any]]:
        with self.daemon.lock:
            was_replaying = self.daemon.replaying
            old = self.daemon.recorded(kind, name, arguments)
            if old is not None:
                self.daemon.journal.append(old)
                self.daemon.state = copy.deepcopy(old.state)
            return old, {"live": True} if was_replaying and old is None else {}

    # -- the mind --

    def op_fact(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        kind = _text(request, "kind", 64)
        with self.daemon.lock:
            value = request["value"]
            if self.daemon.old_facts:
                recorded, value = self.daemon.old_facts.pop(0)
                if recorded != kind:
                    raise Diverged(f"{kind} is not {recorded}")
            self.daemon.facts.append((kind, value))
            return {"value": value}

    def op_message(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        role = _text(request, "role", 64)
        content = json.loads(body) if body is not None else request["content"]
        with self.daemon.lock:
            said = {"role": role, "content": content}
            if self.daemon.replaying and self.daemon.old_messages < len(self.daemon.conversation):
                recorded = self.daemon.conversation[self.daemon.old_messages]
                self.daemon.old_messages += 1
                if recorded != said:
                    raise Diverged(f"{said} is not {recorded}")
                return {}
            self.daemon.conversation.append(said)
        return {}

    def op_messages(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        start = request.get("offset", 0)
        with self.daemon.lock:
            page = self.daemon.conversation[start : start + PAGE]
            more = len(self.daemon.conversation) > start + PAGE
        return {"body": json.dumps(page).encode(), **({"next": start + PAGE} if more else {})}

    def op_state(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        with self.daemon.lock:
            return {"body": json.dumps(self.daemon.state).encode()}

    def op_state_set(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        key = _text(request, "key", 200)
        with self.daemon.lock:
            if body is None and "value" not in request:
                self.daemon.state.pop(key, None)
            else:
                self.daemon.state[key] = json.loads(body) if body is not None else request["value"]
        return {}

    def op_task(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        name, status = _text(request, "name", 200), request.get("status")
        if status not in TASK_STATUSES:
            raise Malformed("status")
        with self.daemon.lock:
            known = {entry["name"]: entry for entry in self.daemon.tasks}
            for other in request.get("depends", []):
                if known.get(other, {}).get("status") != "completed" and not self.daemon.replaying:
                    raise Conflict(f"The task {name} depends on {other}, which has not completed.")
            if name not in known:
                known[name] = {"name": name, "status": status, "depends": request.get("depends", []), "note": None}
                self.daemon.tasks.append(known[name])
            known[name].update(
                status=status, note=request.get("note"), depends=request.get("depends", known[name]["depends"])
            )
            self.daemon.events.append(("task", name, status))
        return {"status": status}

    def op_tasks(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        with self.daemon.lock:
            return {"body": json.dumps(self.daemon.tasks).encode()}

    # -- the store --

    def op_store_get(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        versions = self.daemon.values.get(_place(request), [])
        number = request.get("version", len(versions))
        if not 1 <= number <= len(versions) or versions[number - 1] is None:
            return {}
        return {"value": versions[number - 1], "version": number}

    def op_store_put(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        place = _place(request)
        self._expect(place, request)
        self.daemon.values.setdefault(place, []).append(json.loads(body) if body is not None else request["value"])
        return {"version": len(self.daemon.values[place])}

    def op_store_delete(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        place = _place(request)
        self._expect(place, request)
        if not self.daemon.values.get(place):
            raise NotFound("no such value")
        self.daemon.values[place].append(None)
        return {}

    def _expect(self, place: tuple[str, str], request: dict[str, Any]) -> None:
        versions = self.daemon.values.get(place, [])
        present = len(versions) if versions and versions[-1] is not None else 0
        if request.get("expected_version", present) != present:
            raise Conflict(f"{place} has version {present}")

    def op_store_search(self, request: dict[str, Any], body: bytes | None) -> dict[str, Any]:
        found = []
        for (namespace, key), versions in sorted(self.daemon.values.items()):
            if (
                namespace != request["namespace"]
                or not key.startswith(request.get("prefix", ""))
                or key <= request.get("after", "")
            ):
                continue
            value = versions[-1]
            if value is not None and all(
                value.get(name) == wanted for name, wanted in request.get("where", {}).items()
            ):
                found.append({"key": key, "value": value, "version": len(versions), "namespace": namespace})
        return {"body": json.dumps(found[: request.get("limit", 100)]).encode()}


def _replayed(entry: Entry) -> dict[str, Any]:
    record = {"status": entry.status, **{name: value for name, value in entry.outcome.items() if value is not None}}
    result = record.get("result")
    if result is not None and len(json.dumps(result)) > INLINE_BYTES:
        del record["result"]
        return {"replayed": record, "body": json.dumps(result).encode()}
    return {"replayed": record}


def _check(request: Any) -> None:
    if not isinstance(request, dict) or type(request.get("id")) is not int or not isinstance(request.get("op"), str):
        raise Malformed("not a request")
    nodes, level = 0, [request]
    for _ in range(64):
        holders = [
            list(outer.values()) if isinstance(outer, dict) else outer
            for outer in level
            if isinstance(outer, (dict, list))
        ]
        level = [inner for holder in holders for inner in holder]
        nodes += len(level)
        if nodes > NODE_LIMIT:
            raise Malformed("too many values")
        if not level:
            return
    raise Malformed("too deep")


def _call_id(request: dict[str, Any]) -> str:
    if not isinstance(request.get("call"), str) or not re.fullmatch(r"[0-9a-f]{32}", request["call"]):
        raise Malformed("call")
    return str(request["call"])


def _text(request: dict[str, Any], name: str, limit: int) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= limit or not value.isprintable():
        raise Malformed(name)
    return value


def _is(request: dict[str, Any], name: str, kind: Any, *, optional: bool = False) -> None:
    if name not in request and optional:
        return
    if isinstance(request.get(name), kind) and (kind is bool or not isinstance(request[name], bool)):
        return
    raise Malformed(name)


def _place(request: dict[str, Any]) -> tuple[str, str]:
    return _text(request, "namespace", 200), _text(request, "key", 200)


def _malformed(reason: str) -> Any:
    raise Malformed(reason)
