"""Damage to stored objects, done on purpose for `fault+`: one module for each store.

They know the stores, and no store knows them.
"""
