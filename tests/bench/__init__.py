"""Measures mantou beside mlx_lm.server: both as processes, same model, interleaved rounds. Knows HTTP only."""
