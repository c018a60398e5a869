"""Stores of every kind, as the tests of storage have them."""

from tests.storage.conftest import s3_store, store

__all__ = ["s3_store", "store"]
