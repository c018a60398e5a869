"""Random numbers as functions of a sample's key, and the draws that use them."""
