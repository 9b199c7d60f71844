"""An answer that comes as server-sent events, put together as if it had come whole. Pure.

Events pass on as they come; the mark of the end is held back until the answer was recorded, so
that a client that has seen the end knows what `: farcast-recorded` said before it.
"""

from typing import Any

import msgspec

DONE = b"[DONE]"
_SAID = b": farcast "
MAX_EVENT = 1 << 26


class StreamedAnswer:
    """Bytes in, bytes to pass on out; then the whole answer as JSON."""

    def __init__(self) -> None:
        self._rest = b""
        self._end = b""
        self._choice: dict[str, Any] = {"token_ids": [], "finish_reason": None}
        self._content: list[Any] = []
        self._plain: list[Any] = []
        self._top: dict[str, Any] = {}
        self.problem = ""

    def push(self, chunk: bytes) -> bytes:
        """What may be passed on now: whole lines, without the mark of the end."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        ready = []
        for line in lines:
            if self._end or line.strip() == b"data: " + DONE:
                self._end += line + b"\n"
            else:
                self._look(line.rstrip(b"\r"))
                ready.append(line + b"\n")
        if len(self._rest) > MAX_EVENT:
            self.problem = "an event is too long"
        return b"".join(ready)

    def finish(self, recorded: str) -> bytes:
        """The last words: what was incomplete, whether it was recorded, the mark of the end."""
        return b"%b: farcast-recorded %b\n\n%b" % (self._rest, recorded.encode(), self._end)

    def answer(self) -> bytes:
        """The answer that the events make, or one that nothing can be read from."""
        if self.problem or not self._end:
            self._top["error"] = self.problem or "the stream broke off"
            return msgspec.json.encode({**self._top, "choices": []})
        logprobs = {
            **({"content": self._content} if self._content else {}),
            **({"token_logprobs": self._plain} if self._plain else {}),
        }
        return msgspec.json.encode(
            {**self._top, "choices": [{**self._choice, "logprobs": logprobs or None}]}
        )

    def _look(self, line: bytes) -> None:
        try:
            if line.startswith(_SAID):
                self._top["farcast"] = msgspec.json.decode(line[len(_SAID) :])
            elif line.startswith(b"data:"):
                self._event(msgspec.json.decode(line[5:], type=dict[str, Any]))
        except (msgspec.DecodeError, AttributeError, TypeError, KeyError) as error:
            self.problem = f"an event is not understood ({error})"

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.problem = "the engine broke off"
        if event.get("prompt_token_ids"):
            self._top["prompt_token_ids"] = event["prompt_token_ids"]
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                self.problem = "it has several choices"
            self._choice["token_ids"] += choice.get("token_ids") or []
            for name in ("prompt_token_ids", "finish_reason"):
                if choice.get(name) is not None:
                    self._choice[name] = choice[name]
            if (choice.get("delta") or {}).get("tool_calls"):
                self._choice["message"] = {"tool_calls": [{}]}
            logprobs = choice.get("logprobs") or {}
            self._content += logprobs.get("content") or []
            self._plain += logprobs.get("token_logprobs") or []
