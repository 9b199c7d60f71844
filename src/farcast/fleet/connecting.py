"""How a replica reaches its run: the store, counted, with a relay nearby; and whom it believes."""

from dataclasses import dataclass

from farcast.config import LinkConfig
from farcast.fleet.saying import say
from farcast.lineage import TrustedKey
from farcast.replica.freshness import OnExpiry
from farcast.store import CountingStore, LinkedStore, Store, open_store
from farcast.store.relayed import RelayAddress, RelayedStore


class ReplicaStore(CountingStore):
    """Counts all that a replica reads; `bytes_relayed` of it came from the relay."""

    def __init__(self, store: Store, relay: RelayAddress | None = None) -> None:
        self._relayed = None if relay is None else RelayedStore(store, relay, tell=say)
        super().__init__(store if self._relayed is None else self._relayed)

    @property
    def bytes_relayed(self) -> int:
        return 0 if self._relayed is None else self._relayed.bytes_relayed


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What every kind of replica is told about its run.

    `link` is an emulated one, and `relay` stands on the replica's side of it. With `trusted` only
    versions that this key signed are taken. `served_format` is which of the run's formats (None:
    its first).
    """

    store_url: str
    link: LinkConfig | None = None
    relay: RelayAddress | None = None
    trusted: TrustedKey | None = None
    on_expiry: OnExpiry = "refuse"
    served_format: str | None = None

    def open(self) -> ReplicaStore:
        store = open_store(self.store_url)
        return ReplicaStore(
            store if self.link is None else LinkedStore(store, self.link), self.relay
        )
