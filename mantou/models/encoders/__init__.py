"""Encoder graphs that mlx-lm does not have: BERT, RoBERTa and ModernBERT, each with its head for ranking.

A graph takes right-padded rows and gives a hidden state a position; what becomes of them is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mantou.errors import ModelError
from mantou.models.encoders.bert import Bert
from mantou.models.encoders.modernbert import ModernBert

Encoder = Bert | ModernBert

GRAPHS: Mapping[str, Callable[..., Encoder]] = {"bert": Bert, "modernbert": ModernBert}


def make(graph: str, config: Mapping[str, Any], *, ranks: bool) -> Encoder:
    """The graph with unset weights; `ranks` adds the head of a cross-encoder."""
    try:
        return GRAPHS[graph](config, ranks=ranks)
    except (TypeError, LookupError, ValueError, ArithmeticError) as error:
        raise ModelError(
            f"config.json does not describe a {config['model_type']} model ({error!r}); check the model folder."
        ) from None
