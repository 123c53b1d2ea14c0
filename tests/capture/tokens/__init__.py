"""Ranges of tokens: which parts are found, and what they compute."""
