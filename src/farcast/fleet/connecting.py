"""How a replica reaches the store: counted, behind an emulated link, with a relay nearby."""

from farcast.config import LinkConfig
from farcast.fleet.saying import say
from farcast.store import CountingStore, LinkedStore, Store, open_store
from farcast.store.relayed import RelayAddress, RelayedStore


class ReplicaStore(CountingStore):
    """All that a replica reads, wherever it comes from, is counted; `bytes_relayed` of it came
    from the relay."""

    def __init__(self, store: Store, address: RelayAddress | None = None) -> None:
        self._relayed = None if address is None else RelayedStore(store, address, tell=say)
        super().__init__(store if self._relayed is None else self._relayed)

    @property
    def bytes_relayed(self) -> int:
        return 0 if self._relayed is None else self._relayed.bytes_relayed


def connect(
    store_url: str, link: LinkConfig | None, relay: RelayAddress | None = None
) -> ReplicaStore:
    """The store as seen from a replica. The relay is on this side of the link."""
    store = open_store(store_url)
    return ReplicaStore(store if link is None else LinkedStore(store, link), relay)
