"""Prefix stores: KV that outlives the request that computed it."""
