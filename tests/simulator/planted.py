"""x"""
from contextlib import contextmanager
PLANTED = {"x": None}
@contextmanager
def planted(n):
    yield
