"""Words of live tensors on a device: compared, written and read back where they lie.

What `farcast.replica.live` does with arrays, with torch tensors that never come to the host.
"""

from typing import NamedTuple

import torch

from farcast.delta import AnyBits
from farcast.delta.device import put_on_device, write_on_device
from farcast.delta.placed import DeviceBits, changed_places, differing


class DeviceWords(NamedTuple):
    """Words to write, and those before. `places` count words in C order; None means all."""

    places: torch.Tensor | None
    new: torch.Tensor
    old: torch.Tensor

    def write(self, memory: torch.Tensor, *, old: bool = False) -> None:
        """Overwrite the words of a tensor, whatever its strides."""
        words = self.old if old else self.new
        flat, at = self._at(memory)
        if at is None:
            write_on_device(flat, words.view(flat.shape))
        else:
            put_on_device(flat, at, words)

    def are_old(self, memory: torch.Tensor) -> bool:
        """Whether the tensor holds the words from before."""
        flat, at = self._at(memory)
        live = flat.reshape(-1) if at is None else flat[at]
        return bool(torch.equal(live, self.old))

    def _at(
        self, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, ...] | None]:
        """The tensor, in one row where it has such a view, and what to index it with."""
        contiguous = memory.is_contiguous()
        flat = memory.view(-1) if contiguous else memory
        if self.places is None or contiguous:
            return flat, self.places
        return flat, torch.unravel_index(self.places, memory.shape)


def words_to_write(old: AnyBits, new: AnyBits, *, whole: int) -> DeviceWords | None:
    """What turns live bits into new ones, beside the live ones; None if nothing does. Where more
    than one word in `whole` changes, it is all of them."""
    if not isinstance(old, DeviceBits):
        raise TypeError("These bits lie in host memory.")
    after = old.place(new)
    changed = differing(old, after)
    if not changed:
        return None
    if changed * whole > old.words.numel():
        return DeviceWords(None, after.words, old.copied().words)
    places = changed_places(old, after)
    return DeviceWords(places, after.words[places], old.words[places])
