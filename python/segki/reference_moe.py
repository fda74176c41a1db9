"""Executable specification of mixture-of-experts blocks."""
