"""Where in a tensor, and what: element positions and their words."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from farcast.delta import Words

Positions: TypeAlias = npt.NDArray[np.intp]

__all__ = ["Positions", "Words"]
