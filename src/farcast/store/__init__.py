"""Where versions and trajectories live: an object store behind five methods."""

from farcast.store.archive import Archive
from farcast.store.base import ObjectInfo, Store
from farcast.store.collecting import Garbage, collect_garbage, find_garbage
from farcast.store.counting import CountingStore, Traffic
from farcast.store.link import LinkedStore
from farcast.store.memory import MemoryStore
from farcast.store.opening import open_store
from farcast.store.patience import PatientStore
from farcast.store.probe import probe_conditional_put

__all__ = [
    "Archive",
    "CountingStore",
    "Garbage",
    "LinkedStore",
    "MemoryStore",
    "ObjectInfo",
    "PatientStore",
    "Store",
    "Traffic",
    "collect_garbage",
    "find_garbage",
    "open_store",
    "probe_conditional_put",
]
