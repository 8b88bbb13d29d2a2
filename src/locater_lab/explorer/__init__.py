"""The theory as a page to play with."""
