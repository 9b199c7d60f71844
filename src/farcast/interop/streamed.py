"""An answer that comes as server-sent events, put together as if it had come whole. Pure.

Events pass on as they come; the mark of the end is held back until the answer was recorded, so
that a client that has seen the end knows what `: farcast-recorded` said before it.

Holds no more than `MAX_EVENT` bytes of a line, `MAX_AFTER_END` behind the mark, and the ids and
log-probs of `MAX_TOKENS` tokens. Beyond any of them the stream only passes, byte for byte.
"""

import msgspec

from farcast.interop.answers import Answer, Choice, Logprobs, Message, Provenance, Token
from farcast.trajectory.wire import MAX_TOKENS

DONE = (b"data: [DONE]", b"data:[DONE]")
MAX_EVENT = 1 << 26
"""A prompt of a million token ids is about 7 MB of JSON."""

MAX_AFTER_END = 1 << 16
"""Nothing comes behind the mark of the end but an empty line."""

_SAID = b": farcast "


class _Piece(Choice):
    index: int = 0
    delta: Message | None = None


class _Event(msgspec.Struct):
    choices: list[_Piece] | None = None
    prompt_token_ids: list[int] | None = None
    error: msgspec.Raw | None = None


class StreamedAnswer:
    """Bytes in, bytes to pass on out; then the whole answer as JSON."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._held = 0
        self._end = b""
        self._only_passes = False
        self._begin()
        self.problem = ""

    def push(self, chunk: bytes) -> bytes:
        """What may be passed on now: whole lines, without the mark of the end."""
        if self._only_passes:
            return chunk
        ready = []
        cut = chunk.rfind(b"\n") + 1
        if cut:
            lines = b"".join([*self._rest, chunk[: cut - 1]]).split(b"\n")
            ready = [line + b"\n" for line in lines if self._passes(line)]
            self._rest, self._held = [], 0
        self._rest.append(chunk[cut:])
        self._held += len(chunk) - cut
        if self._held > MAX_EVENT:
            ready += self._give_up("an event is too long")
        elif len(self._end) > MAX_AFTER_END:
            ready += self._give_up("it goes on behind its end")
        return b"".join(ready)

    def finish(self, recorded: str) -> bytes:
        """The last words: what was incomplete, whether it was recorded, the mark of the end."""
        rest = b"".join(self._rest)
        return b"%b: farcast-recorded %b\n\n%b" % (rest, recorded.encode(), self._end)

    def answer(self) -> bytes:
        """The answer that the events make, or one that nothing can be read from."""
        if self.problem or not self._end:
            return msgspec.json.encode(Answer([], problem=self.problem or "it broke off"))
        self._choice.logprobs = Logprobs(self._content or None, self._plain or None)
        return msgspec.json.encode(self._answer)

    def _begin(self) -> None:
        self._ids: list[int] = []
        self._content: list[Token] = []
        self._plain: list[float | None] = []
        self._choice = Choice(token_ids=self._ids)
        self._answer = Answer([self._choice])

    def _give_up(self, problem: str) -> list[bytes]:
        """Nothing of it will be recorded: let go of what is held. What was held back."""
        self.problem, self._only_passes = problem, True
        held = [self._end, *self._rest]
        self._rest, self._end = [], b""
        self._begin()
        return held

    def _passes(self, line: bytes) -> bool:
        """Look at a line; whether it may pass on now."""
        if self._end or line.strip() in DONE:
            self._end += line + b"\n"
            return False
        if not self.problem:
            try:
                self._look(line)
            except (ValueError, RecursionError) as error:
                self.problem = f"an event is not understood ({error})"
        return True

    def _look(self, line: bytes) -> None:
        if line.startswith(_SAID):
            self._answer.farcast = msgspec.json.decode(line[len(_SAID) :], type=Provenance)
        elif line.startswith(b"data:"):
            event = msgspec.json.decode(line[5:], type=_Event)
            if event.error is not None and bytes(event.error) != b"null":
                self.problem = "the engine broke off"
            if event.prompt_token_ids:
                self._answer.prompt_token_ids = event.prompt_token_ids
            for piece in event.choices or ():
                self._add(piece)

    def _add(self, piece: _Piece) -> None:
        if piece.index != 0:
            self.problem = "it has several choices"
        self._ids += piece.token_ids or ()
        if piece.prompt_token_ids is not None:
            self._choice.prompt_token_ids = piece.prompt_token_ids
        if piece.finish_reason is not None:
            self._choice.finish_reason = piece.finish_reason
        if piece.delta is not None and piece.delta.tool_calls:
            self._choice.message = Message(tool_calls=[{}])
        if piece.logprobs is not None:
            self._content += piece.logprobs.content or ()
            self._plain += piece.logprobs.token_logprobs or ()
        if max(len(self._ids), len(self._content), len(self._plain)) > MAX_TOKENS:
            self.problem = "it is too long"
            self._begin()
