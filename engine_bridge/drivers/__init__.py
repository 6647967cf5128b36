"""Adapters of the CacheControl port."""
