"""Descriptions of the public model families: configs, tensor names, special ids. Imports no torch."""
