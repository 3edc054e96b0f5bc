"""The admin API that changes things: knobs, their history, and who watches. docs/admin-api.md is its reference."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.router.app import route
from server.router.audit import DrainRecord
from server.router.dispatch import Dispatcher
from server.router.errors import ApiError, bad_request
from server.router.events import Events
from server.router.http import EventStream, json_response, read_body
from server.router.keys import AdminKeys
from server.router.knobs import Entry, KnobStore
from server.router.tuning import Tuning
from server.router.worker import Worker

Note = Annotated[str, msgspec.Meta(max_length=500)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]


class Change(msgspec.Struct, forbid_unknown_fields=True):
    values: dict[str, Any]
    if_rev: int | None = None
    dry_run: bool = False
    reason: Note = ""
    revert_after_s: Wait = 0.0
    by: Note = ""
    force: bool = False


class Undo(msgspec.Struct, forbid_unknown_fields=True):
    rev: int | None = None
    dry_run: bool = False
    reason: Note = ""
    by: Note = ""


class Reset(msgspec.Struct, forbid_unknown_fields=True):
    knobs: list[str] | None = None
    dry_run: bool = False
    reason: Note = ""
    by: Note = ""


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    name: Note
    role: Literal["prefill", "decode", "colocated"]
    address: Note


class Control:
    def __init__(
        self, tuning: Tuning, dispatcher: Dispatcher, drained: DrainRecord, events: Events, keys: AdminKeys
    ) -> None:
        """Workers that an earlier router of this run had drained stay so."""
        self._tuning = tuning
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._drained = drained
        for name in drained.read():
            if (worker := self._workers.all.get(name)) is not None:
                self._workers.drain(worker, True)
        self._events = events
        self._keys = keys

    def routes(self) -> list[Route]:
        return [
            route("/admin/knobs", self.knobs, methods=["GET"]),
            route("/admin/knobs", self.change, methods=["PATCH"]),
            route("/admin/knobs/undo", self.undo, methods=["POST"]),
            route("/admin/knobs/reset", self.reset, methods=["POST"]),
            route("/admin/audit", self.audit),
            route("/admin/events", self.events),
            route("/admin/workers", self.add_worker, methods=["POST"]),
            route("/admin/workers/{name}", self.remove_worker, methods=["DELETE"]),
            route("/admin/workers/{name}/drain", self.drain, methods=["POST"]),
            route("/admin/workers/{name}/resume", self.resume, methods=["POST"]),
        ]

    async def knobs(self, request: Request) -> Response:
        may_change = self._keys.admit(request)
        found, chooser = describe(self._tuning.store, may_change=may_change), self._dispatcher.chooser
        if chooser.threshold is None and (knob := found["knobs"].get("hybrid.threshold_tokens")):
            knob["measured"] = chooser.crossover.tokens
        return json_response(found)

    async def change(self, request: Request) -> Response:
        self._keys.admit(request)
        body = _decode(await read_body(request), Change)

        def make() -> Entry:
            return self._tuning.store.check(
                body.values,
                if_rev=body.if_rev,
                by=body.by or _peer(request),
                reason=body.reason,
                revert_after_s=body.revert_after_s,
                is_forced=body.force,
            )

        return await self._answer(make, body.dry_run)

    async def undo(self, request: Request) -> Response:
        self._keys.admit(request)
        body = _decode(await read_body(request), Undo)
        by = body.by or _peer(request)
        return await self._answer(lambda: self._tuning.store.undo(body.rev, by=by, reason=body.reason), body.dry_run)

    async def reset(self, request: Request) -> Response:
        self._keys.admit(request)
        body = _decode(await read_body(request), Reset)
        by = body.by or _peer(request)
        return await self._answer(lambda: self._tuning.store.reset(body.knobs, by=by, reason=body.reason), body.dry_run)

    async def _answer(self, make: Callable[[], Entry | None], is_dry: bool) -> Response:
        entry = await self._tuning.change(make, is_dry=is_dry)
        return json_response(_outcome(self._tuning.store.rev, entry, is_dry))

    async def audit(self, request: Request) -> Response:
        self._keys.admit(request)
        store = self._tuning.store
        return json_response({"version": 1, "rev": store.rev, "entries": store.entries})

    async def drain(self, request: Request) -> Response:
        return self._set_draining(request, True)

    async def resume(self, request: Request) -> Response:
        return self._set_draining(request, False)

    def _set_draining(self, request: Request, is_draining: bool) -> Response:
        self._keys.admit(request)
        worker = self._worker(request)
        self._workers.drain(worker, is_draining)
        self._note_drained()
        return json_response(
            {"version": 1, "worker": worker.name, "state": worker.shown_state, "open": len(worker.open)}
        )

    def _note_drained(self) -> None:
        self._drained.write([name for name, each in self._workers.all.items() if each.is_draining])

    def _worker(self, request: Request) -> Worker:
        worker = self._workers.all.get(request.path_params["name"])
        if worker is None:
            known = ", ".join(self._workers.all)
            raise ApiError(404, f"there is no such worker; there are: {known}", param="name", code="UNKNOWN_WORKER")
        return worker

    async def add_worker(self, request: Request) -> Response:
        self._keys.admit(request)
        body = _decode(await read_body(request), NewWorker)
        worker = self._workers.all.get(body.name)  # a router that restarted just now has read of it in its boot file
        if worker is None:
            worker = self._workers.add(body.name, body.role, body.address)
            self._dispatcher.find_routes()
        elif (worker.role, worker.address) != (body.role, body.address):
            raise ApiError(409, f"there is another worker {body.name}", param="name", code="CONFLICTS_WITH")
        return json_response(
            {"version": 1, "worker": worker.name, "state": worker.shown_state, "open": len(worker.open)}
        )

    async def remove_worker(self, request: Request) -> Response:
        self._keys.admit(request)
        worker = self._worker(request)
        if worker.is_connected and not worker.is_drained:
            raise ApiError(409, f"{worker.name} is not drained", param="name", code="CONFLICTS_WITH")
        await self._workers.remove(worker)
        self._note_drained()
        self._dispatcher.find_routes()
        return json_response({"version": 1, "worker": worker.name, "state": "removed", "open": 0})

    async def events(self, request: Request) -> Response:
        self._keys.admit(request)
        return EventStream(self._events.watch())


def describe(store: KnobStore, *, may_change: bool = True) -> dict[str, Any]:
    """What `pdctl get` and the tune screen show, to one who may or may not change them."""
    knobs = {
        name: {
            "now": store.values[name],
            "boot": knob.boot,
            "range": [knob.low, knob.high] if knob.is_share else [int(knob.low), int(knob.high)],
            "step": knob.step,
            "auto": knob.has_auto,
            "unit": knob.unit,
            "applies": knob.applies,
            "help": knob.help,
        }
        for name, knob in store.knobs.items()
    }
    return {"version": 1, "rev": store.rev, "read_only": store.is_read_only or not may_change, "knobs": knobs}


def _outcome(rev: int, entry: Entry | None, is_dry: bool) -> dict[str, Any]:
    """`rev` is the newest one now: that of the change, unless it was dry or changed nothing."""
    after = entry.after if entry else {}
    return {
        "version": 1,
        "rev": rev,
        "dry_run": is_dry,
        "changed": {name: {"from": entry.before[name], "to": value} for name, value in after.items()} if entry else {},
        "pending": list(entry.pending) if entry else [],
        "revert_at": (entry.revert_at or None) if entry else None,
        "undoes": (entry.undoes or None) if entry else None,
    }


def _decode(body: bytes, kind: Any) -> Any:
    """An empty body is an empty object. Raises ApiError 400 BAD_VALUE."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise bad_request(None, f"the body: {error}", "BAD_VALUE") from error
    except RecursionError as error:
        raise bad_request(None, "the body is nested too deeply", "BAD_VALUE") from error


def _peer(request: Request) -> str:
    return request.client.host if request.client else "unknown"
