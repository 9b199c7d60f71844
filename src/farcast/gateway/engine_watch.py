"""Watches that the engine behind a sidecar is still the process whose weights are known.

A connection that is opened and never used ends the moment the engine's process does, before
another one can listen in its place: a restarted engine holds other weights under the same
address. So whenever that connection ends, or a request went wrong, the gate closes; it opens
again once the engine says that it holds what it should. If it holds something else, what was
known of it is forgotten, and the next version is staged from nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from farcast.engines.admission import AdmissionGate
from farcast.engines.http_engine import HttpEngine, label_of
from farcast.errors import EngineError, FarcastError

RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


class EngineWatch:
    """Runs in the event loop that serves. `forget` drops what is known of the engine's weights;
    it is called in another thread."""

    def __init__(
        self, engine: HttpEngine, address: str, gate: AdmissionGate, forget: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._address = address
        self._gate = gate
        self._forget = forget
        self._suspicion = asyncio.Event()
        self.seen = asyncio.Event()
        """Set once the engine answered for the first time."""

    def suspect(self, reason: str) -> None:
        """Something went wrong: serve nothing until the engine was looked at."""
        if not self._suspicion.is_set():
            self._gate.lose(reason)
            self._suspicion.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await _connect(self._address)
            except (OSError, TimeoutError):
                self._gate.lose("The engine does not answer; see whether it still runs.")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                self._suspicion.clear()
                if await asyncio.to_thread(self._examine):
                    self.seen.set()
                    await self._until_gone(reader)
                else:
                    await asyncio.sleep(RETRY_SECONDS)
            finally:
                writer.close()

    async def _until_gone(self, reader: asyncio.StreamReader) -> None:
        ends = [
            asyncio.ensure_future(reader.read(1)),
            asyncio.ensure_future(self._suspicion.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._gate.lose("The engine ended its connection; it is looked at again.")
            if not self._suspicion.is_set():
                _LOG.warning("The engine ended its connection; it is looked at again.")
            for end in ends:
                end.cancel()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end

    def _examine(self) -> bool:
        """Whether the engine can serve; the gate is told what it holds."""
        try:
            self._engine.check_health()
            label = self._engine.label()
        except EngineError as error:
            self._gate.lose(str(error))
            return False
        if self._gate.phase == "committing":  # its label is on the move
            return False
        held = self._gate.held
        if held is None or label == label_of(held):
            self._gate.regain()
            return True
        _LOG.warning("The engine came back without %s; it is brought up to date again.", held)
        try:
            self._forget()
        except FarcastError as error:
            self._gate.lose(str(error))
            return False
        self._gate.forget("The engine was restarted, and is brought to a version again; wait.")
        return True


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    parts = urlsplit(address)
    return await asyncio.open_connection(parts.hostname, parts.port or 80)
