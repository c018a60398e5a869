"""Draft heads: small networks that draft from the states of another model."""
