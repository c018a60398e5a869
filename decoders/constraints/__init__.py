"""Constraints on texts: automata over tokens, and the tokens that each position may have."""
