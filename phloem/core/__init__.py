"""Nouns that every room shares. Imports nothing of Phloem, and no torch."""
