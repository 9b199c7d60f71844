"""A stream of server-sent events on its way through: passed on event by event, with a last word.

An event is passed on the moment it is complete. Before the `[DONE]` that ends a stream (or at its
end) one comment says which versions wrote it; comments are ignored by every client that does not
look for them:

    : farcast {"run_id":"run1","start":{...},"end":{...},"spans":[]}
"""

from farcast.gateway.provenance import MENTION, Provenance, Reported, encode, reported_spans

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]"


class EventRelay:
    """Bytes in, complete events out. The end mark is held back for `finish`."""

    def __init__(self) -> None:
        self._rest = b""
        self._end = b""
        self.reported: Reported = []

    def push(self, chunk: bytes) -> bytes:
        """What may be passed on now."""
        data = self._rest + chunk if self._rest else chunk
        cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if cut < 4:
            self._rest = data
            return b""
        ready, self._rest = data[:cut], data[cut:]
        if MENTION in ready:
            self._look(ready)
        mark = ready.rfind(DONE)
        if mark >= 0 and (mark == 0 or ready[mark - 1 : mark] == b"\n"):
            ready, self._end = ready[:mark], ready[mark:]
        return ready

    def finish(self, said: Provenance) -> bytes:
        """The last words: what was incomplete, the comment, the end mark."""
        return b"%b: farcast %b\n\n%b" % (self._rest, encode(said), self._end)

    def _look(self, events: bytes) -> None:
        for line in events.splitlines():
            if line.startswith(b"data:") and MENTION in line:
                self.reported.extend(reported_spans(line[5:]))
