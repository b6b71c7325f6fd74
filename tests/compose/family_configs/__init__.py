"""Tiny configs of the mlx-lm model families, one module per kind of graph. Knows no arrays and no mlx-lm."""
