"""Keys and values of the running rows: codecs (how they are stored), layouts (where), batch (the one owner)."""
