"""Distils a one-layer draft head from a model's own samples; `scripts/distil_head.py` is the command."""
