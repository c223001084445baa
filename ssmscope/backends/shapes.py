"""Shapes of a recurrence's terms, see `ssmscope.ops.Recurrence`."""

from jaxtyping import Float
from torch import Tensor

Inputs = Float[Tensor, "batch length heads width"]
Channels = Float[Tensor, "batch length heads 1"]
PerHead = Float[Tensor, "batch length heads"]
Decays = Float[Tensor, "batch length heads #state"]
Keys = Float[Tensor, "batch length groups state"]
HeadKeys = Float[Tensor, "batch length heads state"]
Memory = Float[Tensor, "batch heads width state"]
ChannelMemory = Float[Tensor, "batch heads 1 state"]
Start = ChannelMemory | None
Removed = HeadKeys | None
Rates = Float[Tensor, "heads state"]
