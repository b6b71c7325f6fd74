"""Model folders to runnable graphs: where they come from, how they load, how one forward runs."""
