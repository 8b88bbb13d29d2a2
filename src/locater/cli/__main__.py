"""`python -m locater.cli`, where the console script is not on the path."""

from . import main

main()
