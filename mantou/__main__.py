"""`python -m mantou` is `mantou`."""

from mantou.cli import main

main()
