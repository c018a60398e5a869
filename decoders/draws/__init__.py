"""Random numbers as functions of a sample's key, and what is drawn with them."""
