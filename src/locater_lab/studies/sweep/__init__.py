"""Many points of a grid, measured by any number of workers on any engine; a folder holds what is done."""
