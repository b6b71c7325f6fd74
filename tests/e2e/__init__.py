"""The server and the command line as processes: load, faults, bad input, shutdown."""
