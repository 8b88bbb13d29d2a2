from .base import Case

CASES: list[Case] = []
