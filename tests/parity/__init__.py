"""mantou against mlx_lm itself on the starter model."""
