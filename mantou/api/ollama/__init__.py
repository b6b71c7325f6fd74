"""Ollama's API, for clients that speak only that."""
