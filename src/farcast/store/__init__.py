"""Where versions and trajectories live: an object store behind five methods."""

from farcast.store.base import ObjectInfo, Store
from farcast.store.counting import CountingStore, Traffic
from farcast.store.link import LinkedStore
from farcast.store.opening import open_store

__all__ = [
    "CountingStore",
    "LinkedStore",
    "ObjectInfo",
    "Store",
    "Traffic",
    "open_store",
]
