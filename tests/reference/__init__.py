"""An independent reference of the model family in numpy fp64: no cache, no batching, no torch, nothing of `pellucid`.

Written from the published definitions, so that an error would have to be made twice to pass. `tests/numerics`
compares it with transformers, and the engine with it.
"""

from tests.reference.gating import gate
from tests.reference.model import Reference
from tests.reference.rope import Rope

__all__ = ["Reference", "Rope", "gate"]
