"""Measurements: a table for people and, as the last line, one JSON document for machines."""
