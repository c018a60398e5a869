"""What a text must match: automata over tokens, and which tokens may stand where."""
