"""The decoding algorithms and the models that they run. Knows nothing of Ray, files or jobs.

Tensors carry their shape in their names (`tokens_BT`); decoders/engine/state.py has the legend of the letters.
"""
