"""The store's fixture, for the viewer."""

from tests.store.conftest import open_store

__all__ = ["open_store"]
