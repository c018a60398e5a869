"""Code shared by all decoders: slots, batch tensors, acceptance, ends of texts, draft lengths chosen by cost."""
