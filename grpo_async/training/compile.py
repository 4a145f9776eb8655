"""torch.compile of the decoder layers.

One layer at a time: the layers share their code, so that all of them cost one compilation. Attention is called as it is, between
two compiled halves of its layer, because where samples lie changes with every micro-batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from grpo_async.training.recompute import decoder_layers


def compile_layers(model: Any) -> None:
    """Compile the forward of every decoder layer of a Hugging Face causal LM, in place; the first forward pass does the work.

    Call it after adapters were added and before `shard_policy`, whose hooks stay outside. Sizes are dynamic: tokens differ between
    micro-batches. One row (packed) and several are compiled once each.
    """
    for layer in decoder_layers(model):
        forward = layer.forward
        if isinstance(forward, partial):
            # recompute_activations was here: what it recomputes is compiled. Around it, recomputation would be inside the compiled
            # function, and with the attention that is not compiled there, torch would compile nothing
            compiled = torch.compile(forward.args[0], dynamic=True)
            layer.forward = partial(forward.func, compiled, *forward.args[1:], **forward.keywords)
        else:
            layer.forward = torch.compile(forward, dynamic=True)
