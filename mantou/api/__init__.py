"""HTTP in, HTTP out. A dialect is one file: parse + encode. Knows no arrays and nothing of a step."""
