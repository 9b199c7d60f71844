"""What publishing a version took, for the trainer's records. Only numbers."""

import msgspec
from msgspec.structs import replace

from farcast.types import VersionRef


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """One publish. `bytes_sent` counts objects and manifest, `bytes_full` a raw copy.

    `encode_seconds` and `put_seconds` do not overlap: the latter is the time that encoding did
    not hide. `waited_seconds` is how long the trainer's thread was held up. `written` is False
    when the store already held exactly this as its newest version.
    """

    ref: VersionRef
    step: int
    written: bool
    anchor: bool
    changed: int
    elements: int
    bytes_sent: int
    bytes_full: int
    encode_seconds: float
    put_seconds: float
    waited_seconds: float


class PublishTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the versions that a publisher wrote."""

    versions: int = 0
    changed: int = 0
    elements: int = 0
    bytes_sent: int = 0
    bytes_full: int = 0
    encode_seconds: float = 0.0
    put_seconds: float = 0.0
    waited_seconds: float = 0.0

    def plus(self, report: PublishReport) -> "PublishTotals":
        """These totals and one more report; of a version that was there, only the wait."""
        if not report.written:
            return replace(self, waited_seconds=self.waited_seconds + report.waited_seconds)
        sums = {
            name: getattr(self, name) + getattr(report, name)
            for name in self.__struct_fields__
            if name != "versions"
        }
        return PublishTotals(versions=self.versions + 1, **sums)
